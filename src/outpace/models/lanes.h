// Vectors of sixteen numbers, and the operations of packed products and decoder layers.
//
// A vector is a struct of native registers: compilers keep these in registers, but wider vector types in memory. Every
// lane is computed in the same way, so a number's bits depend neither on its lane nor on the other lanes.

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
constexpr int LANES = 16, PART = NATIVE / sizeof(float);  // numbers per vector, and per register

#define ALWAYS __attribute__((always_inline))  // lambdas too, so that captured arrays stay in registers
#define INLINE inline ALWAYS
#define UNROLL _Pragma("GCC unroll 32")  // arrays of registers stay in registers

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

// The same bits as another type.
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

// a * b + c with one rounding, if the CPU supports it. Explicit, because a compiler contracts multiply-adds in some
// places and not in others, so that a row's bits would depend on the batch.
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
#elif defined(PORTABLE)
    Vector found;
    for (int lane = 0; lane < PART; lane++) found[lane] = std::fma(a[lane], b[lane], c[lane]);
    return found;
#else
    return a * b + c;
#endif
  }
}

// The same value; if HELD, it stays in its register, where compilers might read it from memory for each use.
template <bool HELD>
INLINE FloatPart held(FloatPart value) {
#if !defined(PORTABLE) && defined(__AVX512F__)
  if constexpr (HELD) asm("" : "+v"(value));
#elif !defined(PORTABLE) && defined(__x86_64__)
  if constexpr (HELD) asm("" : "+x"(value));
#endif
  return value;
}

// The lanes, rotated to the left by `BY`, or below 4 each four of them: that takes no register for their order.
template <int BY, class Part>
INLINE Part moved(const Part& values) {
  return [&]<int... lanes>(std::integer_sequence<int, lanes...>) {
    return Part{values[BY < 4 ? lanes / 4 * 4 + (lanes + BY) % 4 : (lanes + BY) % PART]...};
  }(std::make_integer_sequence<int, PART>());
}

// Join pairs of lanes, half the distance apart each time, until one is left. From 2 apart on all fours are equal.
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

// The sum of all lanes, always in the same order.
INLINE float total(const Floats& values) {
  return folded(values, [](const auto& a, const auto& b) { return a + b; });
}

// The sum of the registers of a vector: the first steps of `total`.
template <class Vector>
INLINE FloatPart halved(const Vector& values) {
  if constexpr (IN_HALVES<Vector>) {
    return halved(values.low + values.high);
  } else {
    return values;
  }
}

// Exchange lanes that are BY apart between two registers: the first gets those with the lower number of both.
template <int BY, int... LANE>
INLINE void exchange(FloatPart& a, FloatPart& b, std::integer_sequence<int, LANE...>) {
  const FloatPart one = a, other = b;
  a = FloatPart{(LANE & BY ? other[LANE & ~BY] : one[LANE])...};
  b = FloatPart{(LANE & BY ? other[LANE] : one[LANE | BY])...};
}

template <int BY = 1>
INLINE void transpose(FloatPart (&rows)[PART]) {
  if constexpr (BY < PART) {
    UNROLL for (int row = 0; row < PART; row++)
      if (!(row & BY)) exchange<BY>(rows[row], rows[row | BY], std::make_integer_sequence<int, PART>());
    transpose<2 * BY>(rows);
  }
}

// In lane n the sum of all lanes of register n, as `total` adds them.
template <int BY = PART / 2>
INLINE FloatPart totals(FloatPart (&rows)[PART]) {
  UNROLL for (int row = 0; row < BY; row++) {
    exchange<BY>(rows[row], rows[row + BY], std::make_integer_sequence<int, PART>());
    rows[row] = rows[row] + rows[row + BY];
  }
  if constexpr (BY > 1) {
    return totals<BY / 2>(rows);
  } else {
    return rows[0];
  }
}

// The largest lane.
template <class Vector>
INLINE auto highest(const Vector& values) {
  return folded(values, [](const auto& a, const auto& b) { return larger(a, b); });
}

// e to the power of x is (1 + less) * 2^k: `less`, and k in the bits of the exponent.
struct Power {
  Floats less;
  Ints shift;
};
INLINE Power power_of(const Floats& of) {
  // `larger` returns its second argument if one is NaN: NaN stays NaN.
  const Floats x = -larger(splat(-88.0f), -larger(splat(-87.0f), of));
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
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
  return {fused(sum, rest * rest, rest), as<Ints>(shifted) << 23};
}

// To about 2 ulp.
INLINE Floats exponential(const Floats& x) {
  const Power power = power_of(x);
  return as<Floats>(as<Ints>(power.less + 1.0f) + power.shift);
}

// By e^2x - 1, which is accurate near 0.
INLINE Floats tanh_of(const Floats& x) {
  const Power power = power_of(2.0f * x);
  const Floats scale = as<Floats>(as<Ints>(splat(1.0f)) + power.shift);
  const Floats less = fused(power.less, scale, scale - 1.0f);
  return less / (less + 2.0f);
}
INLINE Floats silu(const Floats& x) { return x / (1.0f + exponential(-x)); }
INLINE Floats gelu_tanh(const Floats& x) {
  return x * 0.5f * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x)));
}
INLINE Floats relu(const Floats& x) { return larger(splat(0.0f), x); }  // in this order NaN stays NaN

// By the complementary error function, to a relative error of 1.2e-7: Numerical Recipes' Chebyshev fit.
INLINE Floats gelu(const Floats& x) {
  const Floats size = -larger(splat(-10.0f), larger(x, -x) * -0.70710678f), t = 1.0f / (1.0f + 0.5f * size);
  Floats sum = splat(0.17087277f);
  for (const float factor : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f,
                             0.37409196f, 1.00002368f, -1.26551223f})
    sum = fused(sum, t, splat(factor));
  const Floats rest = t * exponential(sum - size * size);  // of both tails
  return relu(x) - 0.70710678f * rest * size;
}

// The rest works on single registers: packed products compute a panel's outputs register by register.

// float16 to float32.
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
    // Shift the exponent to its place in a float32, and correct its bias by a product, which keeps denormals.
    const uint32_t bits = uint32_t(half & 0x7fff) << 13;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    value *= 5.192296858534828e33f;  // 2^112
    if ((half & 0x7c00) == 0x7c00) value *= INFINITY;  // infinite, or
    if ((half & 0x7fff) > 0x7c00) value -= value;      // NaN
    values[lane] = half & 0x8000 ? -value : value;
  }
  return values;
#endif
}

// bfloat16 to float32.
INLINE FloatPart from_brains(const uint8_t* from) {
  typedef uint16_t Shorts __attribute__((vector_size(NATIVE / 2)));
  typedef uint32_t Longs __attribute__((vector_size(NATIVE)));
  return (FloatPart)(__builtin_convertvector(load<Shorts>(from), Longs) << 16);
}

// LANES of them, register by register: on AVX2 with fewer operations.
#if !defined(PORTABLE) && defined(__AVX2__) && !defined(__AVX512F__)
struct Brains {
  __m256i all;  // the second quarter after the third, for `unpack`
  INLINE explicit Brains(const uint8_t* from) : all(_mm256_permute4x64_epi64(load<__m256i>(from), 0xd8)) {}
  INLINE FloatPart part(int number) const {
    const __m256i none = _mm256_setzero_si256();
    return (FloatPart)(number ? _mm256_unpackhi_epi16(none, all) : _mm256_unpacklo_epi16(none, all));
  }
};
#else
struct Brains {
  const uint8_t* from;
  INLINE explicit Brains(const uint8_t* from) : from(from) {}
  INLINE FloatPart part(int number) const { return from_brains(from + 2 * PART * number); }
};
#endif

// 8-bit integers to float32. Compilers would convert them one by one.
template <class Number>
INLINE FloatPart from_bytes(const uint8_t* from) {
  constexpr bool positive = std::is_unsigned_v<Number>;
#if !defined(PORTABLE) && defined(__AVX512F__)
  const __m128i all = load<__m128i>(from);
  return (FloatPart)_mm512_cvtepi32_ps(positive ? _mm512_cvtepu8_epi32(all) : _mm512_cvtepi8_epi32(all));
#elif !defined(PORTABLE) && defined(__AVX2__)
  const __m128i all = _mm_set_epi64x(0, load<int64_t>(from));
  return (FloatPart)_mm256_cvtepi32_ps(positive ? _mm256_cvtepu8_epi32(all) : _mm256_cvtepi8_epi32(all));
#elif !defined(PORTABLE) && defined(__ARM_NEON)
  const uint32_t all = load<uint32_t>(from);
  if constexpr (positive) return (FloatPart)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(all)))));
  return (FloatPart)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(all)))));
#else
  typedef Number Small __attribute__((vector_size(PART)));
  return __builtin_convertvector(load<Small>(from), FloatPart);
#endif
}

// The offset of 8-bit codes. They are unsigned if the CPU's instruction multiplies unsigned by signed numbers.
#if !defined(PORTABLE) && (defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)))
constexpr int32_t MIDDLE = 128;
#else
constexpr int32_t MIDDLE = 0;
#endif

// Whether shorter codes may be negative.
#if !defined(PORTABLE) && defined(__x86_64__)
constexpr bool SIGNED = false;
#else
constexpr bool SIGNED = true;
#endif

// Eight codes of each row of a pair, of which instructions take four at a time.
struct Inputs {
#if !defined(PORTABLE) && defined(__ARM_NEON)
  int8x16_t all;
  INLINE explicit Inputs(const int8_t* from) : all(vld1q_s8(from)) {}
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

// sums[lane] + the dot product of four codes and four inputs. WIDE: codes have 8 bits; otherwise they are below 64.
template <bool WIDE, int GROUP>
INLINE IntPart dot(const IntPart& sums, const BytePart& codes, const Inputs& inputs) {
#if !defined(PORTABLE) && defined(__AVX512VNNI__)
  return (IntPart)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(inputs.four(GROUP)));
#elif !defined(PORTABLE) && defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (IntPart)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32(inputs.four(GROUP)));
#elif !defined(PORTABLE) && defined(__AVX512BW__)
  const __m512i numbers = _mm512_set1_epi32(inputs.four(GROUP)), ones = _mm512_set1_epi16(1), code = (__m512i)codes;
  __m512i pairs;
  if constexpr (WIDE) {  // the sum of two products could overflow, so signs move to the other factor
    const __m512i turned = _mm512_mask_sub_epi8(numbers, _mm512_movepi8_mask(code), _mm512_setzero_si512(), numbers);
    pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(code), turned);
  } else {
    pairs = _mm512_maddubs_epi16(code, numbers);
  }
  return (IntPart)_mm512_add_epi32((__m512i)sums, _mm512_madd_epi16(pairs, ones));
#elif !defined(PORTABLE) && defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i numbers = _mm256_set1_epi32(inputs.four(GROUP)), ones = _mm256_set1_epi16(1), code = (__m256i)codes;
  __m256i pairs;
  if constexpr (WIDE) {  // the sum of two products could overflow, so signs move to the other factor
    pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(numbers, code));
  } else {
    pairs = _mm256_maddubs_epi16(code, numbers);
  }
  return (IntPart)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(pairs, ones));
#elif !defined(PORTABLE) && defined(__ARM_NEON)
  const int8x16_t code = (int8x16_t)codes;
#if defined(__ARM_FEATURE_DOTPROD)
  return (IntPart)vdotq_laneq_s32((int32x4_t)sums, code, inputs.all, GROUP);
#else
  const int8x16_t numbers = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(inputs.all), GROUP));
  const int16x8_t low = vmull_s8(vget_low_s8(code), vget_low_s8(numbers)), high = vmull_high_s8(code, numbers);
  return (IntPart)vaddq_s32((int32x4_t)sums, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
#else
  IntPart found = sums;
  for (int lane = 0; lane < PART; lane++)
    for (int at = 0; at < 4; at++)
      found[lane] += int32_t(int8_t(codes[4 * lane + at])) * inputs.from[4 * GROUP + at];
  return found;
#endif
}

// Zero. Compilers would copy a constant zero from a register, which costs time; setting a register to zero does not.
INLINE IntPart nothing() {
  IntPart zero = {};
#if !defined(PORTABLE) && defined(__ARM_NEON)
  asm volatile("movi %0.4s, #0" : "=w"(zero));
#endif
  return zero;
}

// i8mm multiplies two rows by two outputs at a time, over eight inputs.
#if !defined(PORTABLE) && defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool SQUARES = true;
INLINE IntPart square(const IntPart& sums, const BytePart& codes, const Inputs& inputs) {
  return (IntPart)vmmlaq_s32((int32x4_t)sums, inputs.all, (int8x16_t)codes);
}

// Rearrange four inputs of four outputs to eight inputs of two outputs.
INLINE void to_squares(BytePart& first, BytePart& second) {
  const int32x4_t one = (int32x4_t)first, other = (int32x4_t)second;
  first = (BytePart)vzip1q_s32(one, other);
  second = (BytePart)vzip2q_s32(one, other);
}

// Rearrange two outputs of two rows to four outputs of one row.
INLINE void to_rows(IntPart& first, IntPart& second) {
  const int64x2_t one = (int64x2_t)first, other = (int64x2_t)second;
  first = (IntPart)vtrn1q_s64(one, other);
  second = (IntPart)vtrn2q_s64(one, other);
}
#else
constexpr bool SQUARES = false;
INLINE IntPart square(const IntPart& sums, const BytePart&, const Inputs&) { return sums; }
INLINE void to_squares(BytePart&, BytePart&) {}
INLINE void to_rows(IntPart&, IntPart&) {}
#endif

// Multiply four groups of codes by four rows, in an order that keeps both vector units busy; compilers choose slower
// ones, with copies between registers.
#if !defined(PORTABLE) && defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool FOURS = true;
INLINE void add_four(IntPart (&sums)[4], const BytePart* codes, const int8_t* one, const int8_t* other) {
#define OF_ROW(sum, code, inputs, at) "sdot %[" sum "].4s, %[" code "].16b, %[" inputs "].4b[" at "]\n"
#define OF_ROWS(code, one, other, first, second)                                                 \
  OF_ROW("s0", code, one, first) OF_ROW("s1", code, one, second) OF_ROW("s2", code, other, first) \
      OF_ROW("s3", code, other, second)
  IntPart s0 = sums[0], s1 = sums[1], s2 = sums[2], s3 = sums[3];
  int8x16_t a, b, c, d;
  asm("ldp %q[a], %q[b], [%[one]]\n ldp %q[c], %q[d], [%[other]]\n"
      OF_ROWS("c0", "a", "c", "0", "2") OF_ROWS("c1", "a", "c", "1", "3")
      OF_ROWS("c2", "b", "d", "0", "2") OF_ROWS("c3", "b", "d", "1", "3")
      : [s0] "+w"(s0), [s1] "+w"(s1), [s2] "+w"(s2), [s3] "+w"(s3),
        [a] "=&w"(a), [b] "=&w"(b), [c] "=&w"(c), [d] "=&w"(d)
      : [c0] "w"(codes[0]), [c1] "w"(codes[1]), [c2] "w"(codes[2]), [c3] "w"(codes[3]), [one] "r"(one),
        [other] "r"(other), "m"(*(const int8_t(*)[32])one), "m"(*(const int8_t(*)[32])other));
  sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
#undef OF_ROWS
#undef OF_ROW
}
#else
constexpr bool FOURS = false;
INLINE void add_four(IntPart (&)[4], const BytePart*, const int8_t*, const int8_t*) {}
#endif

}  // namespace outpace
