// Sixteen numbers at a time, and what packed products and decoder layers do with them.
//
// A vector is as many of the processor's own ones as it takes, named one by one: compilers keep those in registers, and
// larger vectors of their own in memory. Every lane is computed in the same way, so a number's bits never depend on its
// place or its neighbours.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(PORTABLE)
#elif defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace outpace {

#if defined(PORTABLE)
constexpr int NATIVE = 16;  // bytes of a register
#elif defined(__AVX512F__)
constexpr int NATIVE = 64;
#elif defined(__AVX2__)
constexpr int NATIVE = 32;
#else
constexpr int NATIVE = 16;
#endif
constexpr int LANES = 16, PART = NATIVE / sizeof(float);  // numbers of a vector, and of a register

#define INLINE inline __attribute__((always_inline))

typedef float FloatPart __attribute__((vector_size(NATIVE)));
typedef int32_t IntPart __attribute__((vector_size(NATIVE)));
typedef uint8_t BytePart __attribute__((vector_size(NATIVE)));

template <class Half>
struct Two {
  Half low, high;
};

template <class Part, int COUNT>
struct Several {
  using type = Two<typename Several<Part, COUNT / 2>::type>;
};
template <class Part>
struct Several<Part, 1> {
  using type = Part;
};
using Floats = Several<FloatPart, LANES / PART>::type;
using Ints = Several<IntPart, LANES / PART>::type;

template <class>
constexpr bool IN_HALVES = false;
template <class Half>
constexpr bool IN_HALVES<Two<Half>> = true;

template <class Vector>
using HalfOf = decltype(std::declval<Vector>().low);

#define BY_HALVES(op)                                                                                         \
  template <class Half>                                                                                       \
  INLINE Two<Half> operator op(const Two<Half>& a, const Two<Half>& b) {                                      \
    return {a.low op b.low, a.high op b.high};                                                                \
  }                                                                                                           \
  template <class Half, class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>                 \
  INLINE Two<Half> operator op(const Two<Half>& a, Number b) {                                                \
    return {a.low op b, a.high op b};                                                                         \
  }                                                                                                           \
  template <class Half, class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>                 \
  INLINE Two<Half> operator op(Number a, const Two<Half>& b) {                                                \
    return {a op b.low, a op b.high};                                                                         \
  }
BY_HALVES(+)
BY_HALVES(-)
BY_HALVES(*)
BY_HALVES(/)
BY_HALVES(&)
BY_HALVES(<<)
#undef BY_HALVES

template <class Half>
INLINE Two<Half> operator-(const Two<Half>& a) {
  return {-a.low, -a.high};
}

template <class Vector>
INLINE Vector load(const void* from) {
  if constexpr (IN_HALVES<Vector>) {
    using Half = HalfOf<Vector>;
    return {load<Half>(from), load<Half>(static_cast<const char*>(from) + sizeof(Half))};
  } else {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
  }
}

template <class Vector>
INLINE void store(void* to, const Vector& values) {
  if constexpr (IN_HALVES<Vector>) {
    store(to, values.low);
    store(static_cast<char*>(to) + sizeof values.low, values.high);
  } else {
    std::memcpy(to, &values, sizeof values);
  }
}

template <class Vector, class Number>
INLINE Vector filled(Number value) {
  if constexpr (IN_HALVES<Vector>) {
    return {filled<HalfOf<Vector>>(value), filled<HalfOf<Vector>>(value)};
  } else {
    return value - Vector{};
  }
}
INLINE Floats splat(float value) { return filled<Floats>(value); }

// The same bits as another kind of numbers.
template <class To, class From>
INLINE To as(const From& values) {
  if constexpr (IN_HALVES<From>) {
    return {as<HalfOf<To>>(values.low), as<HalfOf<To>>(values.high)};
  } else {
    return (To)values;
  }
}

template <class Vector>
INLINE Vector larger(const Vector& a, const Vector& b) {
  if constexpr (IN_HALVES<Vector>) {
    return {larger(a.low, b.low), larger(a.high, b.high)};
  } else {
    return a > b ? a : b;
  }
}

// a * b + c with one rounding, wherever the processor has it. Written out: a compiler that may join the two does so in
// one place and not in another, and a row's bits would depend on the rows beside it.
template <class Vector>
INLINE Vector fused(const Vector& a, const Vector& b, const Vector& c) {
  if constexpr (IN_HALVES<Vector>) {
    return {fused(a.low, b.low, c.low), fused(a.high, b.high, c.high)};
  } else {
#if !defined(PORTABLE) && defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif !defined(PORTABLE) && defined(__AVX2__) && defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif !defined(PORTABLE) && defined(__ARM_NEON)
    return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
  }
}

// The lanes from `BY` on in front.
template <int BY, class Part>
INLINE Part moved(const Part& values) {
  return [&]<int... lanes>(std::integer_sequence<int, lanes...>) {
    return Part{values[(lanes + BY) % PART]...};
  }(std::make_integer_sequence<int, PART>());
}

// Lane by lane with the lane so many further on, until one is left.
template <class Vector, class Join>
INLINE auto folded(const Vector& values, Join join) {
  if constexpr (IN_HALVES<Vector>) {
    return folded(join(values.low, values.high), join);
  } else {
    Vector all = values;
    if constexpr (PART == 16) all = join(all, moved<8>(all));
    if constexpr (PART >= 8) all = join(all, moved<4>(all));
    all = join(all, moved<2>(all));
    return join(all, moved<1>(all))[0];
  }
}

// The sum, in one order.
INLINE float total(const Floats& values) {
  return folded(values, [](const auto& a, const auto& b) { return a + b; });
}

// The largest.
template <class Vector>
INLINE auto highest(const Vector& values) {
  return folded(values, [](const auto& a, const auto& b) { return larger(a, b); });
}

// e to the power of x, to some 2 in the last place.
INLINE Floats exponential(const Floats& of) {
  const Floats x = -larger(-larger(of, splat(-87.0f)), splat(-88.0f));
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers
  const Floats shifted = fused(x, splat(1.44269504f), magic);
  const Floats whole = shifted - magic;
  Floats rest = fused(whole, splat(-0.693359375f), x);
  rest = fused(whole, splat(2.12194440e-4f), rest);
  Floats sum = splat(1.9875691500e-4f);
  sum = fused(sum, rest, splat(1.3981999507e-3f));
  sum = fused(sum, rest, splat(8.3334519073e-3f));
  sum = fused(sum, rest, splat(4.1665795894e-2f));
  sum = fused(sum, rest, splat(1.6666665459e-1f));
  sum = fused(sum, rest, splat(5.0000001201e-1f));
  sum = fused(sum, rest * rest, rest) + 1.0f;
  return as<Floats>(as<Ints>(sum) + (as<Ints>(shifted) << 23));
}

INLINE Floats tanh_of(const Floats& x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }
INLINE Floats silu(const Floats& x) { return x / (1.0f + exponential(-x)); }
INLINE Floats gelu_tanh(const Floats& x) {
  return x * 0.5f * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x)));
}

// What follows is about registers: packed products compute a panel's outputs register by register.

// Numbers of 16 bits.
INLINE FloatPart from_halves(const uint8_t* from) {
#if !defined(PORTABLE) && defined(__AVX512F__)
  return (FloatPart)_mm512_cvtph_ps(load<__m256i>(from));
#elif !defined(PORTABLE) && defined(__AVX2__) && defined(__F16C__)
  return (FloatPart)_mm256_cvtph_ps(load<__m128i>(from));
#elif !defined(PORTABLE) && defined(__ARM_NEON)
  return (FloatPart)vcvt_f32_f16(load<float16x4_t>(from));
#else
  FloatPart values;
  for (int lane = 0; lane < PART; lane++) {
    uint16_t half;
    std::memcpy(&half, from + 2 * lane, sizeof half);
    // The exponent is moved to where float has it, and its bias put right by a product, which denormals survive.
    const uint32_t bits = uint32_t(half & 0x7fff) << 13;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    value *= 5.192296858534828e33f;  // 2^112
    values[lane] = half & 0x8000 ? -value : value;
  }
  return values;
#endif
}

// Numbers of 8 bits.
template <class Number>
INLINE FloatPart from_bytes(const uint8_t* from) {
  typedef Number Small __attribute__((vector_size(PART)));
  return __builtin_convertvector(load<Small>(from), FloatPart);
}

// What is subtracted from codes of 8 bits. Where the processor multiplies unsigned numbers with signed ones they are
// unsigned; everywhere else 128 is taken from them as they are unpacked.
#if !defined(PORTABLE) && (defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)))
constexpr int32_t MIDDLE = 128;
#else
constexpr int32_t MIDDLE = 0;
#endif

// 32 codes of a row, as the processor takes four of them at a time.
struct Inputs {
#if !defined(PORTABLE) && defined(__ARM_NEON)
  int8x16_t parts[2];
  INLINE explicit Inputs(const int8_t* from) : parts{vld1q_s8(from), vld1q_s8(from + 16)} {}
#else
  const int8_t* from;
  INLINE explicit Inputs(const int8_t* from) : from(from) {}
  INLINE int32_t four(int group) const {
    int32_t all;
    std::memcpy(&all, from + 4 * group, sizeof all);
    return all;
  }
#endif
};

// sums[lane] + the products of four codes with the inputs of a group. WIDE: codes have 8 bits; else they are below 64.
template <bool WIDE, int GROUP>
INLINE IntPart dot(const IntPart& sums, const BytePart& codes, const Inputs& inputs) {
#if !defined(PORTABLE) && defined(__AVX512VNNI__)
  return (IntPart)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(inputs.four(GROUP)));
#elif !defined(PORTABLE) && defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (IntPart)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32(inputs.four(GROUP)));
#elif !defined(PORTABLE) && defined(__AVX512BW__)
  const __m512i numbers = _mm512_set1_epi32(inputs.four(GROUP)), ones = _mm512_set1_epi16(1), code = (__m512i)codes;
  __m512i pairs;
  if constexpr (WIDE) {  // of 8 bits two products could be too large: signs go to the other factor
    const __m512i turned = _mm512_mask_sub_epi8(numbers, _mm512_movepi8_mask(code), _mm512_setzero_si512(), numbers);
    pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(code), turned);
  } else {
    pairs = _mm512_maddubs_epi16(code, numbers);
  }
  return (IntPart)_mm512_add_epi32((__m512i)sums, _mm512_madd_epi16(pairs, ones));
#elif !defined(PORTABLE) && defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i numbers = _mm256_set1_epi32(inputs.four(GROUP)), ones = _mm256_set1_epi16(1), code = (__m256i)codes;
  __m256i pairs;
  if constexpr (WIDE) {  // of 8 bits two products could be too large: signs go to the other factor
    pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(numbers, code));
  } else {
    pairs = _mm256_maddubs_epi16(code, numbers);
  }
  return (IntPart)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(pairs, ones));
#elif !defined(PORTABLE) && defined(__ARM_NEON)
  const int8x16_t code = (int8x16_t)codes, part = inputs.parts[GROUP / 4];
#if defined(__ARM_FEATURE_DOTPROD)
  return (IntPart)vdotq_laneq_s32((int32x4_t)sums, code, part, GROUP % 4);
#else
  const int8x16_t numbers = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(part), GROUP % 4));
  const int16x8_t low = vmull_s8(vget_low_s8(code), vget_low_s8(numbers)), high = vmull_high_s8(code, numbers);
  return (IntPart)vaddq_s32((int32x4_t)sums, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
#else
  IntPart found = sums;
  for (int lane = 0; lane < PART; lane++)
    for (int at = 0; at < 4; at++) {
      const uint8_t code = codes[4 * lane + at];
      found[lane] += (WIDE ? int32_t(int8_t(code)) : int32_t(code)) * inputs.from[4 * GROUP + at];
    }
  return found;
#endif
}

}  // namespace outpace
