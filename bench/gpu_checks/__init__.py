"""The checks behind ``python -m bench.gpu_check``, one module for each concern.

``registry`` runs them. ``variants`` and ``exact`` say what is called and what is right; ``races``
and ``training`` add to the package's own benchmark what only this script times.
"""

from __future__ import annotations
