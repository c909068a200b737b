// The sums over a lane's parts, part[l, s, f, k] of `splits` parts, `filters` and `taps` + 1 numbers each: the
// last of them goes to one place and the others to another. In order, so that it comes to the same each time.

extern "C" __global__ void add_parts(const float* __restrict__ part, float* __restrict__ most,
                                     float* __restrict__ last, int splits, int filters, int taps) {
  const long long lane = blockIdx.y;
  const int size = filters * (taps + 1), e = blockIdx.x * THREADS + threadIdx.x;
  if (e >= size) return;
  part += lane * splits * size + e;
  float total = 0.f;
#pragma unroll 4
  for (int s = 0; s < splits; ++s) total += part[(long long)s * size];
  const int f = e / (taps + 1), k = e % (taps + 1);
  if (k < taps)
    most[(lane * filters + f) * taps + k] = total;
  else
    last[lane * filters + f] = total;
}
