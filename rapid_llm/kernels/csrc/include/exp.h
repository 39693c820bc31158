// exp for fp32 that a compiler can vectorise: no branches, no table, no call.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace rapid_llm {

// exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln(2) / 2, with ln 2 in two parts (Cody and Waite) and the Taylor
// polynomial of degree 7, whose remainder there is below 2^-27 relative. Within 2 ulp; NaN gives NaN, and the ends
// saturate to 0 and infinity. The power of two is applied in two factors, so that subnormal results are right too.
inline float exp(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float n = std::nearbyint(x * 1.44269504088896341f);
  float r = std::fma(n, -0.693145751953125f, x);
  r = std::fma(n, -1.42860682030941723e-6f, r);
  float p = 1.0f / 5040.0f;
  p = std::fma(p, r, 1.0f / 720.0f);
  p = std::fma(p, r, 1.0f / 120.0f);
  p = std::fma(p, r, 1.0f / 24.0f);
  p = std::fma(p, r, 1.0f / 6.0f);
  p = std::fma(p, r, 0.5f);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  // NaN must not reach the conversion to int, whose result would be undefined; p carries it.
  const std::int32_t k = static_cast<std::int32_t>(n == n ? n : 0.0f);
  const std::int32_t half = k >> 1;
  const std::int32_t bits_a = (half + 127) << 23, bits_b = (k - half + 127) << 23;
  float a, b;
  std::memcpy(&a, &bits_a, 4);
  std::memcpy(&b, &bits_b, 4);
  return p * a * b;
}

}  // namespace rapid_llm
