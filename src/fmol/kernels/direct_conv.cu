// Convolutions of lanes with few channels, each lane with weights of its own, in single precision.
//
// A block brings pixels and weights into shared memory once; a thread keeps a tile of results in
// registers and uses each number it reads many times. Compiled for one shape at a time: all names in
// capitals are numbers that stand before this text (see direct_conv.py).
//
// Rows in shared memory lie an odd number of quadruples apart: eight neighbouring rows, read four
// numbers at a time, are then in different banks.

struct alignas(16) Four {
  float v[4];
};

__device__ inline void read(float* into, const float* from, int quads) {
#pragma unroll
  for (int q = 0; q < quads; ++q) {
    const Four four = reinterpret_cast<const Four*>(from)[q];
#pragma unroll
    for (int i = 0; i < 4; ++i) into[4 * q + i] = four.v[i];
  }
}

// A pixel of an image; zero where it lies beside it.
__device__ inline float pixel(const float* plane, int row, int column) {
  return row >= 0 && row < H && column >= 0 && column < W ? plane[row * W + column] : 0.f;
}

#ifdef CONVOLVE

// out[l, n, f, y, x] = b[l, f] + Σ_{c, i, j} w[l, f, c, i, j] · in[l, n, c, y + i − PH, x + j − PW]
//
// A thread has FT filters of XT pixels beside each other. A block has YT rows of IMAGES images, and
// takes CT channels at a time. With TURNED, weights are those of the convolution whose gradient this
// is: w[l, c, f, KH − 1 − i, KW − 1 − j].

constexpr int PARTS = (OW + XT - 1) / XT, GROUPS = (F + FT - 1) / FT;
constexpr int ROWS = YT + KH - 1, WINDOW = (XT + KW - 1 + 3) / 4, FP = (FT + 3) / 4 * 4;
constexpr int STRIDE = ((PARTS - 1) * XT + 4 * WINDOW) / 4 % 2 ? (PARTS - 1) * XT + 4 * WINDOW
                                                               : (PARTS - 1) * XT + 4 * WINDOW + 4;
constexpr int WIDE = OW + KW - 1, EACH = PARTS * YT * GROUPS, THREADS = IMAGES * EACH;
constexpr int STRIPS = (OH + YT - 1) / YT;

extern "C" __global__ void __launch_bounds__(THREADS)
    convolve(const float* __restrict__ in, const float* __restrict__ w,
             const float* __restrict__ b, float* __restrict__ out, int images) {
  alignas(16) __shared__ float pixels[IMAGES][CT][ROWS][STRIDE];
  alignas(16) __shared__ float weights[CT][KH][KW][GROUPS][FP];
  const long long lane = blockIdx.y;
  const int first = blockIdx.x / STRIPS * IMAGES, top = blockIdx.x % STRIPS * YT;
  const int t = threadIdx.x, part = t % PARTS, y = t / PARTS % YT;
  const int group = t / (PARTS * YT) % GROUPS, mine = t / EACH;
  in += lane * images * C * H * W;
  w += lane * F * C * KH * KW;
  out += lane * images * F * OH * OW;

  float sum[FT][XT];
#pragma unroll
  for (int f = 0; f < FT; ++f) {
#if BIAS
    const float start = group * FT + f < F ? b[lane * F + group * FT + f] : 0.f;
#else
    const float start = 0.f;
#endif
#pragma unroll
    for (int x = 0; x < XT; ++x) sum[f][x] = start;
  }

  for (int channel = 0; channel < C; channel += CT) {
    if (channel) __syncthreads();
    for (int e = t; e < IMAGES * CT * ROWS * STRIDE; e += THREADS) {
      const int x = e % STRIDE, row = e / STRIDE % ROWS, c = e / (STRIDE * ROWS) % CT;
      const int image = e / (STRIDE * ROWS * CT), n = first + image;
      const bool there = x < WIDE && channel + c < C && n < images;
      const float* plane = in + ((long long)n * C + channel + c) * (H * W);
      pixels[image][c][row][x] = there ? pixel(plane, top + row - PH, x - PW) : 0.f;
    }
    for (int e = t; e < CT * KH * KW * GROUPS * FP; e += THREADS) {
      const int at = e % FP, filter = e / FP % GROUPS * FT + at, tap = e / (FP * GROUPS);
      const int c = channel + tap / (KH * KW), k = tap % (KH * KW);
      const bool there = at < FT && filter < F && c < C;
#if TURNED
      const int from = (c * F + filter) * (KH * KW) + KH * KW - 1 - k;
#else
      const int from = (filter * C + c) * (KH * KW) + k;
#endif
      (&weights[0][0][0][0][0])[e] = there ? w[from] : 0.f;
    }
    __syncthreads();
#pragma unroll 1
    for (int c = 0; c < CT; ++c) {
#pragma unroll
      for (int i = 0; i < KH; ++i) {
        float row[4 * WINDOW];
        read(row, &pixels[mine][c][y + i][part * XT], WINDOW);
#pragma unroll
        for (int j = 0; j < KW; ++j) {
          float tap[FP];
          read(tap, weights[c][i][j][group], FP / 4);
#pragma unroll
          for (int f = 0; f < FT; ++f)
#pragma unroll
            for (int x = 0; x < XT; ++x) sum[f][x] += tap[f] * row[x + j];
        }
      }
    }
  }

  const int n = first + mine;
  if (n >= images || top + y >= OH) return;
#pragma unroll
  for (int f = 0; f < FT; ++f) {
    const int filter = group * FT + f;
    if (filter >= F) break;
    float* to = out + (((long long)n * F + filter) * OH + top + y) * OW + part * XT;
#if OW % 4 == 0
#pragma unroll
    for (int x = 0; x < XT; x += 4)
      if (part * XT + x < OW)
        *reinterpret_cast<Four*>(to + x) =
            Four{{sum[f][x], sum[f][x + 1], sum[f][x + 2], sum[f][x + 3]}};
#else
#pragma unroll
    for (int x = 0; x < XT; ++x)
      if (part * XT + x < OW) to[x] = sum[f][x];
#endif
  }
}

#else

// part[l, s, f, (c, i, j)] = Σ_{n in split s} Σ_{y, x} g[l, n, f, y, x] · in[l, n, c, y + i − PH, x + j − PW]
// part[l, s, f, C · KH · KW] = Σ g[l, n, f, y, x], the gradient of the bias
//
// A thread has FT filters and a row of taps, (c, i), and every R-th row of the images. A block
// brings YT rows of one image at a time.

constexpr int GROUPS = (F + FT - 1) / FT, ROWS = (YT + KH - 1) % 2 ? YT + KH - 1 : YT + KH;
constexpr int QUADS = (OW + 3) / 4, TAIL = (KW - 1 + 3) / 4;
constexpr int GSTRIDE = QUADS % 2 ? 4 * QUADS : 4 * QUADS + 4;
constexpr int STRIDE = (QUADS + TAIL) % 2 ? 4 * (QUADS + TAIL) : 4 * (QUADS + TAIL) + 4;
constexpr int TAPS = C * KH * KW + 1, WIDE = OW + KW - 1, STRIPS = (OH + YT - 1) / YT;
constexpr int THREADS = C * KH * R * GROUPS, ALL = THREADS * FT * KW + R * GROUPS * FT;
constexpr int STAGED = C * ROWS * STRIDE + GROUPS * FT * YT * GSTRIDE;

extern "C" __global__ void __launch_bounds__(THREADS)
    correlate(const float* __restrict__ in, const float* __restrict__ g,
              float* __restrict__ part, int images, int per_split, int splits) {
  alignas(16) __shared__ float room[STAGED > ALL ? STAGED : ALL];
  float* pixels = room;
  float* slopes = room + C * ROWS * STRIDE;
  const long long lane = blockIdx.y;
  const int split = blockIdx.x, t = threadIdx.x;
  const int c = t % C, i = t / C % KH, r = t / (C * KH) % R, group = t / (C * KH * R);
  const int begin = split * per_split;
  const int end = begin + per_split < images ? begin + per_split : images;
  in += lane * images * C * H * W;
  g += lane * images * F * OH * OW;

  float sum[FT][KW], whole[FT];
#pragma unroll
  for (int f = 0; f < FT; ++f) {
    whole[f] = 0.f;
#pragma unroll
    for (int j = 0; j < KW; ++j) sum[f][j] = 0.f;
  }

  for (int n = begin; n < end; ++n) {
    for (int strip = 0; strip < STRIPS; ++strip) {
      const int top = strip * YT;
      __syncthreads();
      for (int e = t; e < C * (YT + KH - 1) * STRIDE; e += THREADS) {
        const int x = e % STRIDE, row = e / STRIDE % (YT + KH - 1), at = e / (STRIDE * (YT + KH - 1));
        const float* plane = in + ((long long)n * C + at) * (H * W);
        pixels[(at * ROWS + row) * STRIDE + x] = x < WIDE ? pixel(plane, top + row - PH, x - PW) : 0.f;
      }
      for (int e = t; e < GROUPS * FT * YT * QUADS; e += THREADS) {
        const int q = e % QUADS, row = e / QUADS % YT, f = e / (QUADS * YT);
        Four four = {{0.f, 0.f, 0.f, 0.f}};
        if (f < F && top + row < OH) {
          const float* from = g + (((long long)n * F + f) * OH + top + row) * OW + 4 * q;
#if OW % 4 == 0
          four = *reinterpret_cast<const Four*>(from);
#else
#pragma unroll
          for (int k = 0; k < 4; ++k)
            if (4 * q + k < OW) four.v[k] = from[k];
#endif
        }
        *reinterpret_cast<Four*>(slopes + (f * YT + row) * GSTRIDE + 4 * q) = four;
      }
      __syncthreads();
#pragma unroll 1
      for (int y = r; y < YT; y += R) {
        const float* row = pixels + (c * ROWS + y + i) * STRIDE;
        float window[4 + 4 * TAIL];
        read(window, row, TAIL);
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
          read(window + 4 * TAIL, row + 4 * (q + TAIL), 1);
#pragma unroll
          for (int f = 0; f < FT; ++f) {
            float slope[4];
            read(slope, slopes + ((group * FT + f) * YT + y) * GSTRIDE + 4 * q, 1);
#pragma unroll
            for (int x = 0; x < 4; ++x)
#pragma unroll
              for (int j = 0; j < KW; ++j) sum[f][j] += slope[x] * window[x + j];
            if (c == 0 && i == 0) whole[f] += (slope[0] + slope[1]) + (slope[2] + slope[3]);
          }
#pragma unroll
          for (int x = 0; x < 4 * TAIL; ++x) window[x] = window[x + 4];
        }
      }
    }
  }

  // All threads' sums side by side, and then those over the rows.
  __syncthreads();
#pragma unroll
  for (int f = 0; f < FT; ++f)
#pragma unroll
    for (int j = 0; j < KW; ++j)
      room[(((r * GROUPS + group) * FT + f) * C + c) * (KH * KW) + i * KW + j] = sum[f][j];
  if (c == 0 && i == 0)
#pragma unroll
    for (int f = 0; f < FT; ++f) room[THREADS * FT * KW + (r * GROUPS + group) * FT + f] = whole[f];
  __syncthreads();
  part += (lane * splits + split) * F * TAPS;
  for (int e = t; e < F * TAPS; e += THREADS) {
    const int tap = e % TAPS, f = e / TAPS;
    float total = 0.f;
    for (int k = 0; k < R; ++k)
      total += tap < TAPS - 1 ? room[(k * GROUPS * FT + f) * (TAPS - 1) + tap]
                              : room[THREADS * FT * KW + k * GROUPS * FT + f];
    part[e] = total;
  }
}

#endif
