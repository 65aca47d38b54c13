// Sixteen numbers at a time, and what packed products and decoder layers do with them.
//
// Every lane is computed in the same way, so a number's bits never depend on its place or its neighbours. The compiler
// splits these vectors where the processor has smaller ones; only what it does badly is written out for each of them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(PORTABLE)
#elif defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace outpace {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));

#define INLINE inline __attribute__((always_inline))

template <class Vector, class From>
INLINE Vector load(const From* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

INLINE void store(float* to, const Floats& values) { std::memcpy(to, &values, sizeof values); }
INLINE Floats splat(float value) { return value - Floats{}; }
INLINE Ints splat(int32_t value) { return value - Ints{}; }

// Of three vectors, by the processor's own smaller ones.
template <class Part, class Operation>
INLINE Floats by_parts(Operation operation, const Floats& a, const Floats& b, const Floats& c) {
  constexpr int COUNT = sizeof(Floats) / sizeof(Part);
  Part parts[3][COUNT];
  std::memcpy(parts[0], &a, sizeof a);
  std::memcpy(parts[1], &b, sizeof b);
  std::memcpy(parts[2], &c, sizeof c);
  for (int part = 0; part < COUNT; part++) parts[2][part] = operation(parts[0][part], parts[1][part], parts[2][part]);
  Floats found;
  std::memcpy(&found, parts[2], sizeof found);
  return found;
}

INLINE Floats to_floats(const Ints& values) { return __builtin_convertvector(values, Floats); }

// a * b + c with one rounding, wherever the processor has it. Written out: a compiler that may join the two does so in
// one place and not in another, and a row's bits would depend on the rows beside it.
INLINE Floats fused(const Floats& a, const Floats& b, const Floats& c) {
#if !defined(PORTABLE) && defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif !defined(PORTABLE) && defined(__FMA__)
  return by_parts<__m256>([](__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }, a, b, c);
#elif !defined(PORTABLE) && defined(__ARM_NEON)
  return by_parts<float32x4_t>([](float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }, a, b, c);
#else
  return a * b + c;
#endif
}

// The sum, in one order.
INLINE float total(Floats values) {
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; lane++) values[lane] += values[lane + half];
  return values[0];
}

INLINE Floats larger(const Floats& a, const Floats& b) { return a > b ? a : b; }

// e to the power of x, to some 2 in the last place.
INLINE Floats exponential(Floats x) {
  x = larger(x, splat(-87.0f));
  x = x > 88.0f ? splat(88.0f) : x;
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
  return (Floats)((Ints)sum + ((Ints)shifted << 23));
}

INLINE Floats tanh_of(const Floats& x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }
INLINE Floats silu(const Floats& x) { return x / (1.0f + exponential(-x)); }
INLINE Floats gelu_tanh(const Floats& x) {
  return x * 0.5f * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x)));
}

// Sixteen numbers of 16 bits.
INLINE Floats from_halves(const uint8_t* from) {
#if !defined(PORTABLE) && defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif !defined(PORTABLE) && defined(__F16C__)
  Floats values;
  const __m256 parts[2] = {_mm256_cvtph_ps(load<__m128i>(from)), _mm256_cvtph_ps(load<__m128i>(from + 16))};
  std::memcpy(&values, parts, sizeof values);
  return values;
#elif !defined(PORTABLE) && defined(__ARM_NEON)
  Floats values;
  for (int part = 0; part < 4; part++) {
    const float32x4_t four = vcvt_f32_f16(load<float16x4_t>(from + 8 * part));
    std::memcpy(reinterpret_cast<char*>(&values) + 16 * part, &four, sizeof four);
  }
  return values;
#else
  Floats values;
  for (int lane = 0; lane < LANES; lane++) {
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

// Sixteen numbers of 8 bits.
template <class Number>
INLINE Floats from_bytes(const uint8_t* from) {
  typedef Number Small __attribute__((vector_size(16)));
  return __builtin_convertvector(load<Small>(from), Floats);
}

// What is subtracted from codes of 8 bits: they are stored as unsigned numbers, and multiplied as the processor can.
#if !defined(PORTABLE) && defined(__AVX512VNNI__)
constexpr int32_t MIDDLE = 128;
#else
constexpr int32_t MIDDLE = 0;
#endif

// sums[lane] + the products of four unsigned codes with four signed numbers. WIDE: codes of 8 bits, less 128 where
// MIDDLE is 0; otherwise they are below 64.
template <bool WIDE>
INLINE Ints dot(const Ints& sums, const Bytes& codes, const int8_t* four) {
  int32_t all;
  std::memcpy(&all, four, sizeof all);
#if !defined(PORTABLE) && defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(all));
#elif !defined(PORTABLE) && defined(__AVX2__)
  const __m256i numbers = _mm256_set1_epi32(all), ones = _mm256_set1_epi16(1);
  __m256i parts[2], added[2];
  std::memcpy(parts, &codes, sizeof parts);
  std::memcpy(added, &sums, sizeof added);
  for (int part = 0; part < 2; part++) {
    __m256i pairs;
    if constexpr (WIDE) {  // of 8 bits two products could be too large: signs go to the other factor
      const __m256i code = _mm256_xor_si256(parts[part], _mm256_set1_epi8(-128));
      pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(numbers, code));
    } else {
      pairs = _mm256_maddubs_epi16(parts[part], numbers);
    }
    added[part] = _mm256_add_epi32(added[part], _mm256_madd_epi16(pairs, ones));
  }
  Ints result;
  std::memcpy(&result, added, sizeof result);
  return result;
#elif !defined(PORTABLE) && defined(__ARM_NEON)
  const int8x16_t numbers = vreinterpretq_s8_s32(vdupq_n_s32(all));
  int8x16_t parts[4];
  int32x4_t added[4];
  std::memcpy(parts, &codes, sizeof parts);
  std::memcpy(added, &sums, sizeof added);
  for (int part = 0; part < 4; part++) {
    const int8x16_t code = WIDE ? veorq_s8(parts[part], vdupq_n_s8(-128)) : parts[part];
#if defined(__ARM_FEATURE_DOTPROD)
    added[part] = vdotq_s32(added[part], code, numbers);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(code), vget_low_s8(numbers));
    const int16x8_t high = vmull_high_s8(code, numbers);
    const int32x4_t left = vpaddlq_s16(low), right = vpaddlq_s16(high);
    added[part] = vaddq_s32(added[part], vpaddq_s32(left, right));
#endif
  }
  Ints result;
  std::memcpy(&result, added, sizeof result);
  return result;
#else
  Ints result = sums;
  for (int lane = 0; lane < LANES; lane++)
    for (int at = 0; at < 4; at++)
      result[lane] += (WIDE ? int32_t(codes[4 * lane + at]) - 128 : int32_t(codes[4 * lane + at])) * four[at];
  return result;
#endif
}

}  // namespace outpace
