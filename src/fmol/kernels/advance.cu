// One step of all lanes in one pass: delta[l, i] += direction[l, i], x[l, i] −= lr[l · apart] · direction[l, i].
//
// By itself each of the two would read the directions, the largest tensor of a step beside these. D is how
// many numbers a lane has; a thread has four beside each other, which may be of two lanes.

struct alignas(16) Four {
  float v[4];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    advance_lanes(float* __restrict__ x, float* __restrict__ delta,
                  const float* __restrict__ direction, const float* __restrict__ lr, int apart,
                  int lanes) {
  const long long at = 4 * ((long long)blockIdx.x * THREADS + threadIdx.x);
  const long long all = (long long)lanes * D;
  if (at >= all) return;
  const int lane = at / D, left = D - at % D;  // So many of the four, at least one, are of this lane.
  const float first = lr[lane * apart];
  const float second = left < 4 && lane + 1 < lanes ? lr[(lane + 1) * apart] : first;
  if (at + 4 <= all) {
    Four mine = *reinterpret_cast<const Four*>(x + at);
    Four sum = *reinterpret_cast<const Four*>(delta + at);
    const Four step = *reinterpret_cast<const Four*>(direction + at);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      sum.v[k] += step.v[k];
      mine.v[k] -= (k < left ? first : second) * step.v[k];
    }
    *reinterpret_cast<Four*>(x + at) = mine;
    *reinterpret_cast<Four*>(delta + at) = sum;
  } else {
    for (int k = 0; at + k < all; ++k) {
      delta[at + k] += direction[at + k];
      x[at + k] -= first * direction[at + k];
    }
  }
}
