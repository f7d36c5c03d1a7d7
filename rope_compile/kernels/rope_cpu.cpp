// One pass over q and k on a CPU: the kernel of rope_compile::rope and rope_ for CPU tensors.
//
// The maths is that of reference.py, operation by operation: products and sums round apart (built
// with -ffp-contract=off), so that inside the table both give the same bits. A token's row is
// loaded once and walked over all heads of q, then of k. Compiled on first use by native.py.
//
// What this pass does not take (anything check_arguments in ops.py would refuse, and rare forms
// such as a table whose columns are strided) goes to the operators rope_torch and rope_torch_,
// which are written in Python: every error sentence stands there, once.

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Half.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// ------------------------------------------------------------------------- elements and lanes

// L lanes at once, as GCC's vector extension: the compiler picks the machine's instructions.
template <typename U, int L>
struct LanesOf {
  using type __attribute__((vector_size(L * sizeof(U)))) = U;
};
template <typename U>
struct LanesOf<U, 1> {
  using type = U;
};
template <typename U, int L>
using Lanes = typename LanesOf<U, L>::type;

// Bytes of a vector register. Wider vectors are legal, but their shuffles become scalar code.
#ifdef __AVX512F__
constexpr int REGISTER_BYTES = 64;
#else
constexpr int REGISTER_BYTES = 32;
#endif

template <typename To, typename From>
inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <typename U, int L>
inline Lanes<U, L> load(const U* from) {
  Lanes<U, L> lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

template <typename To, int L, typename From>
inline Lanes<To, L> convert(const From& from) {
  if constexpr (L == 1)
    return static_cast<To>(from);
  else
    return __builtin_convertvector(from, Lanes<To, L>);
}

template <typename U, int L>
using Index = Lanes<std::conditional_t<sizeof(U) == 8, int64_t, int32_t>, L>;

// Even and odd elements of 2 L neighbours (first, second), and the neighbours again.
template <typename U, int L, size_t... I>
inline void split(Lanes<U, L>& first, Lanes<U, L>& second, std::index_sequence<I...>) {
  if constexpr (L > 1) {
    const auto even = __builtin_shuffle(first, second, Index<U, L>{(2 * I)...});
    second = __builtin_shuffle(first, second, Index<U, L>{(2 * I + 1)...});
    first = even;
  }
}
template <typename U, int L, size_t... I>
inline void join(Lanes<U, L>& even, Lanes<U, L>& odd, std::index_sequence<I...>) {
  if constexpr (L > 1) {
    const auto first = __builtin_shuffle(even, odd, Index<U, L>{(I / 2 + I % 2 * L)...});
    odd = __builtin_shuffle(even, odd, Index<U, L>{(L / 2 + I / 2 + I % 2 * L)...});
    even = first;
  }
}

// A format says how L elements become lanes of `Real`, the arithmetic's type, and back with one
// rounding. The pair forms read and write 2 L neighbours as even and odd lanes.
template <typename FORMAT, typename ELEMENT, typename REAL>
struct Format {
  using Element = ELEMENT;
  using Real = REAL;
  template <int L>
  static void read_pairs(const Element* from, Lanes<Real, L>& even, Lanes<Real, L>& odd) {
    even = FORMAT::template read<L>(from);
    odd = FORMAT::template read<L>(from + L);
    split<Real, L>(even, odd, std::make_index_sequence<L>());
  }
  template <int L>
  static void write_pairs(Element* to, Lanes<Real, L> even, Lanes<Real, L> odd) {
    join<Real, L>(even, odd, std::make_index_sequence<L>());
    FORMAT::template write<L>(to, even);
    FORMAT::template write<L>(to + L, odd);
  }
};

template <typename T>
struct Native : Format<Native<T>, T, T> {
  template <int L>
  static Lanes<T, L> read(const T* from) {
    return load<T, L>(from);
  }
  template <int L>
  static void write(T* to, Lanes<T, L> lanes) {
    std::memcpy(to, &lanes, sizeof(lanes));
  }
};

struct BFloat16 : Format<BFloat16, uint16_t, float> {
  template <int L>
  static Lanes<uint32_t, L> rounded(Lanes<float, L> lanes) {
    const auto bits = bits_as<Lanes<uint32_t, L>>(lanes);
    // To nearest, ties to even. A NaN must not carry over into infinity.
    const Lanes<uint32_t, L> upper = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (bits & 0x7fffffffu) > 0x7f800000u ? (bits | 0x400000u) : upper;
  }
  template <int L>
  static Lanes<float, L> read(const uint16_t* from) {
    return bits_as<Lanes<float, L>>(convert<uint32_t, L>(load<uint16_t, L>(from)) << 16);
  }
  template <int L>
  static void write(uint16_t* to, Lanes<float, L> lanes) {
    if constexpr (L == 1)
      *to = static_cast<uint16_t>(rounded<L>(lanes) >> 16);
    else
      write_upper<L>(to, rounded<L>(lanes), std::make_index_sequence<L>());
  }
  // A pair of neighbours is one 32-bit lane (little-endian): splitting it takes no shuffle.
  template <int L>
  static void read_pairs(const uint16_t* from, Lanes<float, L>& even, Lanes<float, L>& odd) {
    Lanes<uint32_t, L> both;
    std::memcpy(&both, from, sizeof(both));
    even = bits_as<Lanes<float, L>>(both << 16);
    odd = bits_as<Lanes<float, L>>(both & 0xffff0000u);
  }
  template <int L>
  static void write_pairs(uint16_t* to, Lanes<float, L> even, Lanes<float, L> odd) {
    const Lanes<uint32_t, L> both =
        (rounded<L>(even) >> 16) | (rounded<L>(odd) & 0xffff0000u);
    std::memcpy(to, &both, sizeof(both));
  }

 private:
  // The upper 16 bits of each lane, as one shuffle: a conversion becomes scalar code with AVX2.
  template <int L, size_t... I>
  static void write_upper(uint16_t* to, Lanes<uint32_t, L> bits, std::index_sequence<I...>) {
    const auto words = bits_as<Lanes<uint16_t, 2 * L>>(bits);
    const auto upper = __builtin_shuffle(
        words, Lanes<int16_t, 2 * L>{(2 * I + 1)..., (2 * I + 1)...});
    std::memcpy(to, &upper, sizeof(upper) / 2);
  }
};

// The compiler does not vectorise these conversions; the instructions for them are old (2012).
struct Float16 : Format<Float16, uint16_t, float> {
  template <int L>
  static Lanes<float, L> read(const uint16_t* from) {
#ifdef __AVX512F__
    if constexpr (L == 16)
      return bits_as<Lanes<float, L>>(_mm512_cvtph_ps(load_bits<__m256i>(from)));
#endif
#ifdef __F16C__
    if constexpr (L == 8)
      return bits_as<Lanes<float, L>>(_mm256_cvtph_ps(load_bits<__m128i>(from)));
#endif
    std::array<float, L> lanes;
    for (int i = 0; i < L; ++i) lanes[i] = c10::detail::fp16_ieee_to_fp32_value(from[i]);
    return bits_as<Lanes<float, L>>(lanes);
  }
  template <int L>
  static void write(uint16_t* to, Lanes<float, L> lanes) {
#ifdef __AVX512F__
    if constexpr (L == 16) {
      const auto bits = _mm512_cvtps_ph(bits_as<__m512>(lanes), _MM_FROUND_TO_NEAREST_INT);
      std::memcpy(to, &bits, sizeof(bits));
      return;
    }
#endif
#ifdef __F16C__
    if constexpr (L == 8) {
      const auto bits = _mm256_cvtps_ph(bits_as<__m256>(lanes), _MM_FROUND_TO_NEAREST_INT);
      std::memcpy(to, &bits, sizeof(bits));
      return;
    }
#endif
    const auto each = bits_as<std::array<float, L>>(lanes);
    for (int i = 0; i < L; ++i) to[i] = c10::detail::fp16_ieee_from_fp32_value(each[i]);
  }

 private:
  template <typename V>
  static V load_bits(const uint16_t* from) {
    V bits;
    std::memcpy(&bits, from, sizeof(bits));
    return bits;
  }
};

enum class Pairing { half, interleaved };

// cos and sin of both channels of each pair. low' = low * cos_low - high * sin_low and
// high' = high * cos_high + low * sin_high; an inverse comes with its sines exchanged and negated.
struct Angles {
  const float *cos_low, *sin_low, *cos_high, *sin_high;
};

// L pairs from lane i on. Everything is read before anything is written: out may be x.
template <int L, Pairing READ, Pairing WRITTEN, typename F>
inline void rotate_lanes(
    const typename F::Element* x, typename F::Element* out, int64_t half, int64_t i,
    const Angles& at) {
  using Real = typename F::Real;
  const auto angle = [i](const float* from) {
    return convert<Real, L>(load<float, L>(from + i));
  };
  Lanes<Real, L> low, high;
  if constexpr (READ == Pairing::half) {
    low = F::template read<L>(x + i);
    high = F::template read<L>(x + half + i);
  } else {
    F::template read_pairs<L>(x + 2 * i, low, high);
  }
  const Lanes<Real, L> new_low = low * angle(at.cos_low) - high * angle(at.sin_low);
  const Lanes<Real, L> new_high = high * angle(at.cos_high) + low * angle(at.sin_high);
  if constexpr (WRITTEN == Pairing::half) {
    F::template write<L>(out + i, new_low);
    F::template write<L>(out + half + i, new_high);
  } else {
    F::template write_pairs<L>(out + 2 * i, new_low, new_high);
  }
}

// All `half` pairs of one head: whole registers, then half of one, then single lanes.
template <Pairing READ, Pairing WRITTEN, typename F>
inline void rotate_head(
    const typename F::Element* x, typename F::Element* out, int64_t half, const Angles& at) {
  constexpr int L = REGISTER_BYTES / sizeof(typename F::Real);
  int64_t i = 0;
  for (; i + L <= half; i += L) rotate_lanes<L, READ, WRITTEN, F>(x, out, half, i, at);
  for (; i + L / 2 <= half; i += L / 2) rotate_lanes<L / 2, READ, WRITTEN, F>(x, out, half, i, at);
  for (; i < half; ++i) rotate_lanes<1, READ, WRITTEN, F>(x, out, half, i, at);
}

// --------------------------------------------------------------------------------- one call

constexpr int MAX_LEAD = 6;  // token dimensions; more go to rope_torch

struct Side;
using RotateToken = void (*)(const Side&, const void* x, void* out, const Angles&, void* scratch);

// q or k, and where its rotation goes. Strides count elements.
struct Side {
  const char* x;
  char* out;
  bool in_place;
  int64_t itemsize, heads, head_dim, x_head, x_channel, out_head, out_channel;
  int64_t x_lead[MAX_LEAD], out_lead[MAX_LEAD];
  int64_t half, offset;
  const int64_t* blocks;  // first lane of every block of style half_blocks, then half; or null
  RotateToken rotate;
};

template <Pairing READ, Pairing WRITTEN, typename F, typename T = typename F::Element>
inline void rotate_rotated(const Side& side, const T* x, T* out, const Angles& at) {
  if (!side.blocks) return rotate_head<READ, WRITTEN, F>(x, out, side.half, at);
  for (const int64_t* block = side.blocks; *block < side.half; ++block) {
    const int64_t first = block[0], lanes = block[1] - first;
    rotate_head<READ, WRITTEN, F>(
        x + 2 * first, out + 2 * first, lanes,
        {at.cos_low + first, at.sin_low + first, at.cos_high + first, at.sin_high + first});
  }
}

// What the hardware does not foresee: heads of which a part is read, with gaps between. 128 heads of
// 64 channels in rows of 192 take a third of the time (8, 16, 32 heads ahead: 16 serves all widths).
// Past the last head of a token lies, as a rule, the next token; an address of nothing does no harm.
constexpr int64_t HEADS_AHEAD = 16, CACHE_LINE_BYTES = 64;

template <Pairing READ, Pairing WRITTEN, typename F>
void rotate_token(
    const Side& side, const void* x_token, void* out_token, const Angles& at, void* scratch) {
  using T = typename F::Element;
  const int64_t width = 2 * side.half, stop = side.offset + width;
  const bool passes = !side.in_place && width < side.head_dim;
  const bool dense = side.x_channel == 1 && side.out_channel == 1;
  for (int64_t head = 0; head < side.heads; ++head) {
    const T* x = static_cast<const T*>(x_token) + head * side.x_head;
    T* out = static_cast<T*>(out_token) + head * side.out_head;
    if (dense) {
      for (int64_t i = 0; i < width; i += CACHE_LINE_BYTES / sizeof(T))
        __builtin_prefetch(x + HEADS_AHEAD * side.x_head + side.offset + i);
      if (passes) {
        std::memcpy(out, x, side.offset * sizeof(T));
        std::memcpy(out + stop, x + stop, (side.head_dim - stop) * sizeof(T));
      }
      rotate_rotated<READ, WRITTEN, F>(side, x + side.offset, out + side.offset, at);
      continue;
    }
    // Through a dense copy of the head.
    T* head_copy = static_cast<T*>(scratch);
    const int64_t first = side.in_place ? side.offset : 0;
    const int64_t last = side.in_place ? stop : side.head_dim;
    if (side.x_channel == 1)
      std::memcpy(head_copy + first, x + first, (last - first) * sizeof(T));
    else
      for (int64_t i = first; i < last; ++i) head_copy[i] = x[i * side.x_channel];
    if (READ == WRITTEN) {
      rotate_rotated<READ, WRITTEN, F>(
          side, head_copy + side.offset, head_copy + side.offset, at);
    } else {  // channels move: what is read must not be written over
      T* moved = head_copy + side.head_dim;
      std::memcpy(moved, head_copy + side.offset, width * sizeof(T));
      rotate_rotated<READ, WRITTEN, F>(side, moved, head_copy + side.offset, at);
    }
    for (int64_t i = first; i < last; ++i) out[i * side.out_channel] = head_copy[i];
  }
}

template <typename F>
RotateToken rotation(Pairing read, Pairing written) {
  using P = Pairing;
  if (read == P::half)
    return written == P::half ? rotate_token<P::half, P::half, F>
                              : rotate_token<P::half, P::interleaved, F>;
  return written == P::half ? rotate_token<P::interleaved, P::half, F>
                            : rotate_token<P::interleaved, P::interleaved, F>;
}

RotateToken rotation(at::ScalarType dtype, Pairing read, Pairing written) {
  switch (dtype) {
    case at::kFloat:
      return rotation<Native<float>>(read, written);
    case at::kBFloat16:
      return rotation<BFloat16>(read, written);
    case at::kHalf:
      return rotation<Float16>(read, written);
    default:
      return rotation<Native<double>>(read, written);
  }
}

// Where the angles of a call come from.
struct Table {
  const float* cache;
  int64_t rows, row, half;
  const void* inv_freq;  // null: the nearest row serves a position outside the table
  bool exact;            // inv_freq is float64: nothing is rounded before the cosine
  double magnitude;

  void compute(int64_t position, int64_t lane, float& cos, float& sin) const {
    double phase = static_cast<double>(position) *
        (exact ? static_cast<const double*>(inv_freq)[lane]
               : static_cast<double>(static_cast<const float*>(inv_freq)[lane]));
    if (!exact) phase = static_cast<double>(static_cast<float>(phase));
    cos = static_cast<float>(std::cos(phase) * magnitude);
    sin = static_cast<float>(std::sin(phase) * magnitude);
  }

  // The row of a position, or null where there is none to read.
  const float* find(int64_t position) const {
    if (position >= 0 && position < rows) return cache + position * row;
    return inv_freq ? nullptr : cache + (position < 0 ? 0 : rows - 1) * row;
  }
};

struct Call {
  Side sides[2];
  int side_count;
  int lead;
  int64_t sizes[MAX_LEAD];
  const void* positions;
  bool wide_positions;  // int64
  int64_t position_axis, position_lead[MAX_LEAD];
  at::IntArrayRef axes;
  bool inverse;
  Table table;

  int64_t position(int64_t offset) const {
    return wide_positions ? static_cast<const int64_t*>(positions)[offset]
                          : static_cast<const int32_t*>(positions)[offset];
  }
};

// Room for the angles of one token: [cos, sin] of the low and of the high channels.
using Room = c10::SmallVector<float, 512>;

Angles angles_of(const Call& call, int64_t offset, Room& room) {
  const Table& table = call.table;
  const int64_t half = table.half;
  float* own = room.data();
  Angles at;
  if (call.axes.empty()) {
    const int64_t position = call.position(offset);
    const float* row = table.find(position);
    if (!row) {
      for (int64_t i = 0; i < half; ++i) table.compute(position, i, own[i], own[half + i]);
      row = own;
    }
    at = {row, row + half, row, row + half};
  } else {
    for (int64_t i = 0; i < static_cast<int64_t>(call.axes.size()); ++i) {
      const int64_t lane = i % half, side = i / half * 2 * half;
      const int64_t position = call.position(offset + call.axes[i] * call.position_axis);
      const float* row = table.find(position);
      float &cos = own[side + lane], &sin = own[side + half + lane];
      if (row)
        cos = row[lane], sin = row[half + lane];
      else
        table.compute(position, lane, cos, sin);
    }
    const float* high = static_cast<int64_t>(call.axes.size()) > half ? own + 2 * half : own;
    at = {own, own + half, high, high + half};
  }
  if (call.inverse) {
    float* negated = own + 4 * half;
    for (int64_t i = 0; i < half; ++i) {
      negated[i] = -at.sin_high[i];
      negated[half + i] = -at.sin_low[i];
    }
    at.sin_low = negated;
    at.sin_high = negated + half;
  }
  return at;
}

// Elements below which a second thread costs more than it gives.
constexpr int64_t ELEMENTS_PER_THREAD = 32768;

void run(const Call& call) {
  int64_t tokens = 1, per_token = 0, widest = 0;
  for (int d = 0; d < call.lead; ++d) tokens *= call.sizes[d];
  for (int s = 0; s < call.side_count; ++s) {
    const Side& side = call.sides[s];
    per_token += side.heads * side.head_dim;
    widest = std::max(widest, (side.head_dim + 2 * side.half) * side.itemsize);
  }
  if (!tokens || !per_token) return;
  const int64_t grain = std::max<int64_t>(1, ELEMENTS_PER_THREAD / per_token);
  at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
    Room room(6 * call.table.half);
    c10::SmallVector<double, 128> scratch(widest / 8 + 1);
    int64_t index[MAX_LEAD] = {};
    for (int64_t d = call.lead - 1, rest = begin; d >= 0; --d) {
      index[d] = rest % call.sizes[d];
      rest /= call.sizes[d];
    }
    for (int64_t token = begin; token < end; ++token) {
      int64_t at_position = 0, at_x[2] = {}, at_out[2] = {};
      for (int d = 0; d < call.lead; ++d) {
        at_position += index[d] * call.position_lead[d];
        for (int s = 0; s < call.side_count; ++s) {
          at_x[s] += index[d] * call.sides[s].x_lead[d];
          at_out[s] += index[d] * call.sides[s].out_lead[d];
        }
      }
      const Angles angles = angles_of(call, at_position, room);
      for (int s = 0; s < call.side_count; ++s) {
        const Side& side = call.sides[s];
        side.rotate(
            side, side.x + at_x[s] * side.itemsize, side.out + at_out[s] * side.itemsize, angles,
            scratch.data());
      }
      for (int d = call.lead - 1; d >= 0 && ++index[d] == call.sizes[d]; --d) index[d] = 0;
    }
  });
}

// ---------------------------------------------------------------------- from tensors to a call

// glibc maps fresh pages for every allocation above this, and each costs a fault and the zeroing of
// 4 KB when it is first written.
constexpr int64_t LARGE_BYTES = int64_t{32} << 20;

// Ask for them in pieces of 2 MB: q of 67 MB, float32, 2 threads, takes 10 ms instead of 22. No store
// goes past the caches: it gains a third where all pages are there already, and loses a factor of 2
// to 4 where some are not, which nothing here can tell.
void ask_for_huge_pages(const Tensor& out) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t HUGE_PAGE = uintptr_t{2} << 20;
  if (static_cast<int64_t>(out.nbytes()) < LARGE_BYTES) return;
  const auto start = reinterpret_cast<uintptr_t>(out.mutable_data_ptr());
  const auto first = (start + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  const auto last = (start + out.nbytes()) / HUGE_PAGE * HUGE_PAGE;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Whether the memory is there: a storage resized to nothing leaves its tensors their shapes.
bool alive(const Tensor& x) { return x.storage().nbytes() || !x.numel(); }

bool is_float(const Tensor& x) {
  const auto dtype = x.scalar_type();
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
      dtype == at::kDouble;
}

// Fill all of `call` but the outputs; false for anything this pass does not take.
bool describe(
    Call& call, c10::SmallVectorImpl<int64_t>& blocks, const Tensor& q, const MaybeTensor& k,
    const Tensor& positions, const Tensor& cache, const MaybeTensor& inv_freq, at::IntArrayRef axes,
    std::string_view style, int64_t rotary_offset, double attention_scaling, bool inverse) {
  const bool to_half = style == "interleaved_to_half", in_blocks = style == "half_blocks";
  const bool interleaved = style == "interleaved";
  if (!to_half && !in_blocks && !interleaved && style != "half") return false;
  call.lead = static_cast<int>(q.dim()) - 2;
  call.side_count = k.has_value() ? 2 : 1;
  if (call.lead < 0 || call.lead > MAX_LEAD || cache.dim() != 2) return false;
  const int64_t half = cache.size(1) / 2;
  if (cache.scalar_type() != at::kFloat || half == 0 || cache.size(1) % 2 || cache.stride(1) != 1 ||
      !cache.is_cpu() || !positions.is_cpu() || !alive(cache) || !alive(positions))
    return false;
  if (positions.scalar_type() != at::kLong && positions.scalar_type() != at::kInt) return false;
  if (inv_freq.has_value()) {
    if (!inv_freq->is_cpu() || !alive(*inv_freq) || inv_freq->dim() != 1 || inv_freq->size(0) != half ||
        (half > 1 && inv_freq->stride(0) != 1) ||
        (inv_freq->scalar_type() != at::kFloat && inv_freq->scalar_type() != at::kDouble))
      return false;
  } else if (cache.size(0) == 0) {
    return false;
  }

  const int64_t lanes = static_cast<int64_t>(axes.size());
  call.axes = axes;
  int64_t axis_count = 1;
  if (lanes) {
    if (lanes != half && (lanes != 2 * half || style != "half")) return false;
    for (int64_t i = 0; i < lanes; ++i) {
      if (axes[i] < 0 || (in_blocks && i && axes[i] < axes[i - 1])) return false;
      axis_count = std::max(axis_count, axes[i] + 1);
      if (in_blocks && (i == 0 || axes[i] != axes[i - 1])) blocks.push_back(i);
    }
    if (in_blocks) blocks.push_back(half);
  } else if (in_blocks) {
    return false;
  }

  const Pairing paired = to_half ? (inverse ? Pairing::half : Pairing::interleaved)
      : interleaved              ? Pairing::interleaved
                                 : Pairing::half;
  const Pairing written =
      to_half ? (inverse ? Pairing::interleaved : Pairing::half) : paired;
  for (int d = 0; d < call.lead; ++d) call.sizes[d] = q.size(d);
  for (int s = 0; s < call.side_count; ++s) {
    const Tensor& x = s ? *k : q;
    if (!x.is_cpu() || !alive(x) || !is_float(x) || x.dim() != call.lead + 2) return false;
    Side& side = call.sides[s];
    side.x = static_cast<const char*>(x.const_data_ptr());
    side.itemsize = static_cast<int64_t>(x.element_size());
    side.heads = x.size(-2);
    side.head_dim = x.size(-1);
    side.x_head = x.stride(-2);
    side.x_channel = side.head_dim > 1 ? x.stride(-1) : 1;
    side.half = half;
    side.offset = rotary_offset;
    side.blocks = in_blocks ? blocks.data() : nullptr;
    side.rotate = rotation(x.scalar_type(), paired, written);
    if (rotary_offset < 0 || rotary_offset > side.head_dim - 2 * half) return false;
    for (int d = 0; d < call.lead; ++d) {
      if (x.size(d) != call.sizes[d]) return false;
      side.x_lead[d] = x.stride(d);
    }
  }

  // Positions [(axes,) token dimensions]: what is missing or 1 is the same for all.
  int first = 0;
  call.position_axis = 0;
  if (lanes && positions.dim() > 1) {
    first = 1;
    if (positions.size(0) != axis_count && positions.size(0) != 1) return false;
    if (positions.size(0) != 1) call.position_axis = positions.stride(0);
  }
  const int given = static_cast<int>(positions.dim()) - first;
  if (given > call.lead) return false;
  for (int d = 0; d < call.lead; ++d) {
    const int at = d - (call.lead - given);
    call.position_lead[d] = 0;
    if (at < 0 || positions.size(first + at) == 1) continue;
    if (positions.size(first + at) != call.sizes[d]) return false;
    call.position_lead[d] = positions.stride(first + at);
  }
  call.positions = positions.const_data_ptr();
  call.wide_positions = positions.scalar_type() == at::kLong;
  call.inverse = inverse;
  call.table = {
      cache.const_data_ptr<float>(),
      cache.size(0),
      cache.stride(0),
      half,
      inv_freq.has_value() ? inv_freq->const_data_ptr() : nullptr,
      inv_freq.has_value() && inv_freq->scalar_type() == at::kDouble,
      static_cast<double>(static_cast<float>(attention_scaling))};
  return true;
}

// Whether no two indices of these dimensions meet, each step being wider than all smaller ones
// together; `reach` is what lies within one step.
bool nested(c10::SmallVectorImpl<std::pair<int64_t, int64_t>>& dims, int64_t reach) {
  std::sort(dims.begin(), dims.end());
  for (const auto& [stride, size] : dims) {
    if (size <= 1) continue;
    if (stride <= reach) return false;
    reach += stride * (size - 1);
  }
  return true;
}

using Dims = c10::SmallVector<std::pair<int64_t, int64_t>, 8>;

// True when it is plain that no element is written twice; what is not plain, Python decides.
bool writable(const Tensor& q, const MaybeTensor& k) {
  for (int s = 0; s < (k.has_value() ? 2 : 1); ++s) {
    const Tensor& x = s ? *k : q;
    Dims dims;
    for (int64_t d = 0; d < x.dim(); ++d) dims.emplace_back(x.stride(d), x.size(d));
    if (x.numel() && !nested(dims, 0)) return false;
  }
  if (!k.has_value() || !q.numel() || !k->numel() || !q.storage().is_alias_of(k->storage()))
    return true;
  // Two slices of one packed projection: same steps from token to token, apart within one.
  if (q.scalar_type() != k->scalar_type()) return false;
  Dims tokens;
  for (int64_t d = 0; d < q.dim() - 2; ++d) {
    if (q.size(d) > 1 && q.stride(d) != k->stride(d)) return false;
    tokens.emplace_back(q.stride(d), q.size(d));
  }
  const auto last = [](const Tensor& x) {
    return x.storage_offset() + (x.size(-2) - 1) * x.stride(-2) + (x.size(-1) - 1) * x.stride(-1);
  };
  const bool apart = q.storage_offset() > last(*k) || k->storage_offset() > last(q);
  const int64_t span =
      std::max(last(q), last(*k)) - std::min(q.storage_offset(), k->storage_offset());
  return apart && nested(tokens, span);
}

// ------------------------------------------------------------------------------ the operators

#define ROPE_PARAMETERS                                                                     \
  const Tensor &q, const MaybeTensor &k, const Tensor &positions, const Tensor &cache,      \
      const MaybeTensor &inv_freq, at::IntArrayRef axes, std::string_view style,            \
      int64_t rotary_offset, double attention_scaling, bool inverse
#define ROPE_ARGUMENTS                                                                      \
  q, k, positions, cache, inv_freq, axes, style, rotary_offset, attention_scaling, inverse

using Rotated = std::tuple<Tensor, MaybeTensor>;
using Functional = Rotated(ROPE_PARAMETERS);
using InPlace = void(ROPE_PARAMETERS);

template <typename Signature>
auto handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

torch::jit::Stack boxed(ROPE_PARAMETERS) {
  torch::jit::Stack stack;
  stack.reserve(10);
  torch::jit::push(
      stack, q, k, positions, cache, inv_freq, axes, std::string(style), rotary_offset,
      attention_scaling, inverse);
  return stack;
}

Rotated rope(ROPE_PARAMETERS) {
  Call call;
  c10::SmallVector<int64_t, 8> blocks;
  if (!describe(call, blocks, ROPE_ARGUMENTS)) {
    static const auto rope_torch = handle<Functional>("rope_compile::rope_torch");
    at::AutoDispatchBelowADInplaceOrView below;
    return rope_torch.call(ROPE_ARGUMENTS);
  }
  Rotated result;
  for (int s = 0; s < call.side_count; ++s) {
    const Tensor& x = s ? *k : q;
    Tensor out = at::detail::empty_cpu(x.sizes(), x.scalar_type());
    ask_for_huge_pages(out);
    Side& side = call.sides[s];
    side.out = static_cast<char*>(out.mutable_data_ptr());
    side.in_place = false;
    side.out_channel = 1;
    side.out_head = side.head_dim;
    int64_t step = side.heads * side.head_dim;
    for (int d = call.lead - 1; d >= 0; --d) {
      side.out_lead[d] = step;
      step *= call.sizes[d];
    }
    if (s)
      std::get<1>(result) = std::move(out);
    else
      std::get<0>(result) = std::move(out);
  }
  run(call);
  return result;
}

void rope_(ROPE_PARAMETERS) {
  Call call;
  c10::SmallVector<int64_t, 8> blocks;
  if (style == "interleaved_to_half" || !describe(call, blocks, ROPE_ARGUMENTS) ||
      !writable(q, k)) {
    static const auto rope_torch_ = handle<InPlace>("rope_compile::rope_torch_");
    at::AutoDispatchBelowADInplaceOrView below;
    return rope_torch_.call(ROPE_ARGUMENTS);
  }
  for (int s = 0; s < call.side_count; ++s) {
    Side& side = call.sides[s];
    side.out = static_cast<char*>((s ? *k : q).mutable_data_ptr());
    side.in_place = true;
    side.out_channel = side.x_channel;
    side.out_head = side.x_head;
    std::copy(side.x_lead, side.x_lead + call.lead, side.out_lead);
  }
  run(call);
}

// ----------------------------------------------------------------------- in front of autograd

// Gradients are defined once, in Python. A call that records none need not visit Python at all; one
// that does goes to the Python kernel, which stands behind the key of devices without their own.
bool records_gradient(const Tensor& q, const MaybeTensor& k) {
  const bool recording = at::GradMode::is_enabled();
  const auto tracked = [=](const Tensor& x) {
    return (recording && x.requires_grad()) || x._fw_grad(/*level=*/0).defined();
  };
  return tracked(q) || (k.has_value() && tracked(*k));
}

constexpr c10::DispatchKeySet IN_PYTHON(c10::DispatchKey::AutogradOther);

Rotated rope_autograd(c10::DispatchKeySet keys, ROPE_PARAMETERS) {
  static const auto rope = handle<Functional>("rope_compile::rope");
  const auto below = keys & c10::after_autograd_keyset;
  if (!records_gradient(q, k)) return rope.redispatch(below, ROPE_ARGUMENTS);
  auto stack = boxed(ROPE_ARGUMENTS);
  rope.redispatchBoxed(below | IN_PYTHON, &stack);
  return {stack[0].toTensor(), stack[1].toOptional<Tensor>()};
}

void rope_inplace_autograd(c10::DispatchKeySet keys, ROPE_PARAMETERS) {
  static const auto rope_ = handle<InPlace>("rope_compile::rope_");
  const auto below = keys & c10::after_autograd_keyset;
  if (records_gradient(q, k)) {
    auto stack = boxed(ROPE_ARGUMENTS);
    return rope_.redispatchBoxed(below | IN_PYTHON, &stack);
  }
  rope_.redispatch(below, ROPE_ARGUMENTS);
  // A raw write does not tell autograd; without this a saved q would be used silently changed.
  for (const Tensor* x : {&q, k.has_value() ? &*k : nullptr})
    if (x && !x->is_inference()) x->unsafeGetTensorImpl()->bump_version();
}

}  // namespace

// In the process that has just built this library, rope and rope_ have their kernels already and
// call these. Registering over a kernel that another thread may be calling is not safe.
TORCH_LIBRARY_FRAGMENT(rope_compile, m) {
  const std::string rest =
      "Tensor positions, Tensor cos_sin_cache, Tensor? inv_freq, int[] axes, str style, "
      "int rotary_offset, float attention_scaling, bool inverse";
  m.def(("rope_native(Tensor q, Tensor? k, " + rest + ") -> (Tensor, Tensor?)").c_str());
  m.def(("rope_native_(Tensor(a!) q, Tensor(b!)? k, " + rest + ") -> ()").c_str());
}

TORCH_LIBRARY_IMPL(rope_compile, CPU, m) {
  m.impl("rope_native", TORCH_FN(rope));
  m.impl("rope_native_", TORCH_FN(rope_));
}

// Called while the package is imported, before anything can call the operators.
extern "C" __attribute__((visibility("default"))) void rope_compile_register() {
  static torch::Library cpu(
      torch::Library::IMPL, "rope_compile", c10::DispatchKey::CPU, __FILE__, __LINE__);
  cpu.impl("rope", TORCH_FN(rope));
  cpu.impl("rope_", TORCH_FN(rope_));
  // The front knows no device: CUDA tensors, whose kernel is Triton's, skip the same hop.
  static torch::Library front[] = {
      {torch::Library::IMPL, "rope_compile", c10::DispatchKey::AutogradCPU, __FILE__, __LINE__},
      {torch::Library::IMPL, "rope_compile", c10::DispatchKey::AutogradCUDA, __FILE__, __LINE__}};
  for (torch::Library& library : front) {
    library.impl("rope", TORCH_FN(rope_autograd));
    library.impl("rope_", TORCH_FN(rope_inplace_autograd));
  }
}
