// Vectors of floats, as wide as the CPU's registers.

#pragma once

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
constexpr int WIDTH = BYTES / sizeof(float);

typedef float Vector __attribute__((vector_size(BYTES), aligned(alignof(float)), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

inline float total(Vector sums) {
  for (int half = WIDTH / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
  return sums[0];
}

}  // namespace
