// Convolutions of lanes with few channels, each lane with weights of its own, on tensor cores: pixels,
// weights and slopes are rounded to TF32, and sums are in single precision.
//
// Windows are read where they lie in shared memory: a fragment's number is a pixel's place plus a
// tap's, so nothing is written out. Compiled for one shape at a time: all names in capitals are numbers
// that stand before this text (see tensor_conv.py).
//
// A product is of 16 × 8 by 8 × 8 numbers, shared out among a warp. Of its 32 threads, with `group` of
// eight and `member` of four in each, one has of the left side rows group and group + 8 in columns
// member and member + 4, of the right side column group in rows member and member + 4, and of the sum
// columns 2 · member and the next in rows group and group + 8.

constexpr int ahead = 4;  // How often a thread asks for numbers from memory before it waits.

#ifdef __CUDACC__
__device__ inline float tf32(float value) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return __uint_as_float(rounded);
}

__device__ inline void add_product(float* sum, const float* left, const float* right) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(__float_as_uint(left[0])), "r"(__float_as_uint(left[1])),
        "r"(__float_as_uint(left[2])), "r"(__float_as_uint(left[3])),
        "r"(__float_as_uint(right[0])), "r"(__float_as_uint(right[1])));
}
#endif

constexpr int TAPS = KH * KW, STRIPS = (OH + YT - 1) / YT, PIXELS = YT * OW;
constexpr int ROWS = YT + KH - 1, STRIDE = OW + KW - 1, PLANE = ROWS * STRIDE;
constexpr int RIGHTS = (F + 7) / 8;  // Filters, eight at a time.

// A pixel of an image, rounded; zero where it lies beside it.
__device__ inline float pixel_at(const float* plane, int row, int column) {
  if (row < 0 || row >= H || column < 0 || column >= W) return 0.f;
  return tf32(plane[row * W + column]);
}

#ifdef CONVOLVE

// out[l, n, f, y, x] = b[l, f] + Σ_{c, i, j} w[l, f, c, i, j] · in[l, n, c, y + i − PH, x + j − PW]
//
// Left are windows, a row a pixel, right are weights. A warp has LEFTS times 16 pixels and all filters.
// A block has YT rows of IMAGES images, and takes CT channels at a time. With TURNED, weights are those
// of the convolution whose gradient this is: w[l, c, f, KH − 1 − i, KW − 1 − j].

constexpr int DEPTH = (CT * TAPS + 7) / 8 * 8, TILES = (PIXELS + 15) / 16;
constexpr int WARPS = (IMAGES * TILES + LEFTS - 1) / LEFTS, THREADS = 32 * WARPS;
// Eight filters of four rows beside each other are in different banks.
constexpr int WIDE = RIGHTS == 1 ? 8 : RIGHTS <= 3 ? 24 : 40;

extern "C" __global__ void __launch_bounds__(THREADS)
    convolve(const float* __restrict__ in, const float* __restrict__ w,
             const float* __restrict__ b, float* __restrict__ out, int images) {
  __shared__ float pixels[IMAGES * CT * PLANE];
  __shared__ float weights[DEPTH * WIDE];
  __shared__ int places[DEPTH];
  const long long lane = blockIdx.y;
  const int first = blockIdx.x / STRIPS * IMAGES, top = blockIdx.x % STRIPS * YT;
  const int t = threadIdx.x, warp = t / 32, group = t % 32 / 4, member = t % 4;
  in += lane * images * C * H * W;
  w += lane * F * C * TAPS;
  out += lane * images * F * OH * OW;
  for (int e = t; e < DEPTH * WIDE; e += THREADS) weights[e] = 0.f;
  // What is filled up has weights of zero, and looks at a pixel that counts anyway.
  for (int k = t; k < DEPTH; k += THREADS) {
    const int tap = k % TAPS;
    places[k] = k < CT * TAPS ? k / TAPS * PLANE + tap / KW * STRIDE + tap % KW : 0;
  }

  int at[LEFTS][2];
#pragma unroll
  for (int m = 0; m < LEFTS; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile = warp * LEFTS + m, image = tile / TILES;
      const int p = tile % TILES * 16 + 8 * half + group;
      const bool there = image < IMAGES && p < PIXELS;
      at[m][half] = there ? image * CT * PLANE + p / OW * STRIDE + p % OW : 0;
    }
  float sum[LEFTS][RIGHTS][4];
#pragma unroll
  for (int n = 0; n < RIGHTS; ++n)
#pragma unroll
    for (int column = 0; column < 2; ++column) {
#if BIAS
      const int f = 8 * n + 2 * member + column;
      const float start = f < F ? b[lane * F + f] : 0.f;
#else
      const float start = 0.f;
#endif
#pragma unroll
      for (int m = 0; m < LEFTS; ++m) sum[m][n][column] = sum[m][n][2 + column] = start;
    }

  for (int channel = 0; channel < C; channel += CT) {
    __syncthreads();
#pragma unroll ahead
    for (int e = t; e < IMAGES * CT * PLANE; e += THREADS) {
      const int column = e % STRIDE, row = e / STRIDE % ROWS, c = e / PLANE % CT;
      const int n = first + e / (CT * PLANE);
      float pixel = 0.f;
      if (channel + c < C && n < images)
        pixel = pixel_at(in + ((long long)n * C + channel + c) * (H * W), top + row - PH, column - PW);
      pixels[e] = pixel;
    }
    // As they lie in memory. Channels beyond the last have no pixels, whatever their weights.
#if TURNED
    const int many = (C - channel < CT ? C - channel : CT) * F * TAPS;
#else
    const int many = F * CT * TAPS;
#endif
#pragma unroll ahead
    for (int e = t; e < many; e += THREADS) {
#if TURNED
      const int filter = e / TAPS % F, k = e / (TAPS * F) * TAPS + TAPS - 1 - e % TAPS;
      const float weight = w[channel * F * TAPS + e];
#else
      const int k = e % (CT * TAPS), filter = e / (CT * TAPS);
      const bool there = C % CT == 0 || channel + k / TAPS < C;
      const float weight = there ? w[(filter * C + channel) * TAPS + k] : 0.f;
#endif
      weights[k * WIDE + filter] = tf32(weight);
    }
    __syncthreads();
#pragma unroll 2
    for (int k = member; k < DEPTH; k += 8) {
      const int near = places[k], far = places[k + 4];
      float right[RIGHTS][2];
#pragma unroll
      for (int n = 0; n < RIGHTS; ++n) {
        right[n][0] = weights[k * WIDE + 8 * n + group];
        right[n][1] = weights[(k + 4) * WIDE + 8 * n + group];
      }
#pragma unroll
      for (int m = 0; m < LEFTS; ++m) {
        const float left[4] = {pixels[at[m][0] + near], pixels[at[m][1] + near],
                               pixels[at[m][0] + far], pixels[at[m][1] + far]};
#pragma unroll
        for (int n = 0; n < RIGHTS; ++n) add_product(sum[m][n], left, right[n]);
      }
    }
  }

#pragma unroll
  for (int m = 0; m < LEFTS; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile = warp * LEFTS + m, n = first + tile / TILES;
      const int p = tile % TILES * 16 + 8 * half + group;
      if (tile >= IMAGES * TILES || n >= images || p >= PIXELS || top + p / OW >= OH) continue;
      float* to = out + (long long)n * F * OH * OW + top * OW + p;
#pragma unroll
      for (int r = 0; r < RIGHTS; ++r)
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const int f = 8 * r + 2 * member + column;
          if (f < F) to[f * (OH * OW)] = sum[m][r][2 * half + column];
        }
    }
}

#else

// part[l, s, f, (c, i, j)] = Σ_{n in split s} Σ_{y, x} g[l, n, f, y, x] · in[l, n, c, y + i − PH, x + j − PW]
// part[l, s, f, C · KH · KW] = Σ g[l, n, f, y, x], the gradient of the bias
//
// Left are windows, a row a tap and the last one ones, right are slopes. A warp has LEFTS times 16 taps
// and all filters, of every R-th eight pixels. A block brings YT rows of one image at a time.

constexpr int ALL = C * TAPS + 1, TILES = (ALL + 15) / 16, ACROSS = (TILES + LEFTS - 1) / LEFTS;
constexpr int WARPS = ACROSS * R, THREADS = 32 * WARPS, DEPTH = (PIXELS + 7) / 8 * 8;
constexpr int LINE = DEPTH + 4;  // Four pixels of eight filters are in different banks.
constexpr int ONES = C * PLANE, STAGED = ONES + YT * STRIDE + 8 * RIGHTS * LINE;
constexpr int SUMS = R * F * ALL;

extern "C" __global__ void __launch_bounds__(THREADS)
    correlate(const float* __restrict__ in, const float* __restrict__ g,
              float* __restrict__ part, int images, int per_split, int splits) {
  __shared__ float room[STAGED > SUMS ? STAGED : SUMS];
  __shared__ int places[DEPTH];
  float* slopes = room + ONES + YT * STRIDE;
  const long long lane = blockIdx.y;
  const int split = blockIdx.x, t = threadIdx.x, warp = t / 32, group = t % 32 / 4, member = t % 4;
  const int across = warp % ACROSS, r = warp / ACROSS;
  const int begin = split * per_split;
  const int end = begin + per_split < images ? begin + per_split : images;
  in += lane * images * C * H * W;
  g += lane * images * F * OH * OW;
  for (int e = t; e < YT * STRIDE; e += THREADS) room[ONES + e] = 1.f;
  for (int p = t; p < DEPTH; p += THREADS) places[p] = p < PIXELS ? p / OW * STRIDE + p % OW : 0;

  int at[LEFTS][2];
  float sum[LEFTS][RIGHTS][4];
#pragma unroll
  for (int m = 0; m < LEFTS; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tap = (across * LEFTS + m) * 16 + 8 * half + group;
      at[m][half] = tap < ALL - 1 ? tap / TAPS * PLANE + tap % TAPS / KW * STRIDE + tap % KW
                    : tap < ALL   ? ONES
                                  : 0;
    }
#pragma unroll
    for (int n = 0; n < RIGHTS; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[m][n][i] = 0.f;
  }

  for (int n = begin; n < end; ++n) {
    for (int strip = 0; strip < STRIPS; ++strip) {
      const int top = strip * YT;
      __syncthreads();
#pragma unroll ahead
      for (int e = t; e < C * PLANE; e += THREADS)
        room[e] = pixel_at(in + ((long long)n * C + e / PLANE) * (H * W),
                           top + e / STRIDE % ROWS - PH, e % STRIDE - PW);
#pragma unroll ahead
      for (int e = t; e < 8 * RIGHTS * DEPTH; e += THREADS) {
        const int p = e % DEPTH, f = e / DEPTH;
        float slope = 0.f;
        if (f < F && p < PIXELS && top + p / OW < OH)
          slope = tf32(g[((long long)n * F + f) * (OH * OW) + top * OW + p]);
        slopes[f * LINE + p] = slope;
      }
      __syncthreads();
#pragma unroll 2
      for (int k = 8 * r + member; k < DEPTH; k += 8 * R) {
        const int near = places[k], far = places[k + 4];
        float right[RIGHTS][2];
#pragma unroll
        for (int f = 0; f < RIGHTS; ++f) {
          right[f][0] = slopes[(8 * f + group) * LINE + k];
          right[f][1] = slopes[(8 * f + group) * LINE + k + 4];
        }
#pragma unroll
        for (int m = 0; m < LEFTS; ++m) {
          const float left[4] = {room[at[m][0] + near], room[at[m][1] + near],
                                 room[at[m][0] + far], room[at[m][1] + far]};
#pragma unroll
          for (int f = 0; f < RIGHTS; ++f) add_product(sum[m][f], left, right[f]);
        }
      }
    }
  }

  // All warps' sums side by side, and then those over the pixels.
  __syncthreads();
#pragma unroll
  for (int m = 0; m < LEFTS; ++m)
#pragma unroll
    for (int n = 0; n < RIGHTS; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int tap = (across * LEFTS + m) * 16 + i / 2 * 8 + group, f = 8 * n + 2 * member + i % 2;
        if (tap < ALL && f < F) room[(r * F + f) * ALL + tap] = sum[m][n][i];
      }
  __syncthreads();
  part += (lane * splits + split) * F * ALL;
  for (int e = t; e < F * ALL; e += THREADS) {
    float total = 0.f;
    for (int k = 0; k < R; ++k) total += room[k * F * ALL + e];
    part[e] = total;
  }
}

#endif
