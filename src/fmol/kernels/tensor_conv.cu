// Convolutions of lanes with few channels, each lane with weights of its own, on tensor cores: pixels,
// weights and slopes are rounded to TF32, and sums are in single precision.
//
// A product is of 16 × 8 by 8 × 8 numbers, shared out among a warp. Of its 32 threads, with `group` of
// eight and `member` of four in each, one has of the left side rows group and group + 8 in columns
// member and member + 4, of the right side column group in rows member and member + 4, and of the sum
// columns 2 · member and the next in rows group and group + 8.
//
// Which pixel or tap is which row or column is free, and chosen so that a thread has runs of four pixels
// beside each other. It reads a run with what its windows reach of the row, four numbers at a time, and
// has the left sides for a whole line of taps, those of a channel in a row: shared memory is slower than
// the products. Compiled for one shape at a time: all names in capitals are numbers that stand before
// this text (see tensor_conv.py, which also says how far apart rows, planes and filters lie).

constexpr int ahead = 6;  // How often a thread asks for numbers from memory before it waits.

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

// Numbers beside each other that are moved at once.
template <int N>
struct alignas(4 * N) Some {
  float v[N];
};

// Where numbers are and go; zeros where they are not there.
struct Move {
  int from, to;
  bool there;
};

// Brings so many times N numbers, rounded. All that is asked for at a time is on its way before the
// first is put down.
template <int N, int THREADS, class Find>
__device__ inline void bring(float* to, const float* from, int units, Find find) {
#pragma unroll 1
  for (int begin = threadIdx.x; begin < units; begin += ahead * THREADS) {
    Some<N> some[ahead] = {};
#pragma unroll
    for (int k = 0; k < ahead; ++k) {
      const int e = begin + k * THREADS;
      const Move move = find(e);
      if (e < units && move.there) some[k] = *reinterpret_cast<const Some<N>*>(from + move.from);
    }
#pragma unroll
    for (int k = 0; k < ahead; ++k) {
      const int e = begin + k * THREADS;
#pragma unroll
      for (int i = 0; i < N; ++i) some[k].v[i] = tf32(some[k].v[i]);
      if (e < units) *reinterpret_cast<Some<N>*>(to + find(e).to) = some[k];
    }
  }
}

template <int N>
__device__ inline void read(float* into, const float* from) {
#pragma unroll
  for (int q = 0; q < N / 4; ++q) {
    const Some<4> four = reinterpret_cast<const Some<4>*>(from)[q];
#pragma unroll
    for (int i = 0; i < 4; ++i) into[4 * q + i] = four.v[i];
  }
}

// How many numbers can be moved at once in steps of so many.
__host__ __device__ constexpr int at_once(int step) {
  return step % 4 == 0 ? 4 : step % 2 == 0 ? 2 : 1;
}

__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

#ifndef CONVOLVE
constexpr int CT = C;
#endif
constexpr int TAPS = KH * KW, STRIPS = (OH + YT - 1) / YT, ROWS = YT + KH - 1;
constexpr int RUNS = (OW + 3) / 4;   // Of a row of results.
constexpr int RIGHTS = (F + 7) / 8;  // Filters, eight at a time.

// What a strip sees of an image: the columns that lie in it and, of a single strip, the rows.
constexpr int WIDE = PW < 0 ? W + 2 * PW : W;
constexpr int HIGH = STRIPS > 1 ? ROWS : PH < 0 ? H + 2 * PH : H;
constexpr int PIXELS = smaller(at_once(W), at_once(PW)), UNITS = WIDE / PIXELS;
// Zeros beside the image; with several strips, rows above and below it are brought as zeros.
constexpr int MARGIN = (STRIPS > 1 || PH < 0 ? 0 : PH * STRIDE) + (PW < 0 ? 0 : PW);

// Brings `many` of CT channels of `count` images. As steps in memory and here differ only from one row,
// plane or image to the next, what is the same in both costs nothing to find.
template <int THREADS>
__device__ inline void bring_pixels(float* pixels, const float* from, int top, int count, int many) {
  const int above = STRIPS > 1 ? top - PH : PH < 0 ? -PH : 0;
  from += above * W + (PW < 0 ? -PW : 0);
  bring<PIXELS, THREADS>(pixels, from, count * (CT * HIGH * UNITS), [=](int e) {
    const int row = e / UNITS, plane = row / HIGH, y = above + row % HIGH;
    const int at = PIXELS * e + row * (W - WIDE) + plane * ((H - HIGH) * W) +
                   plane / CT * ((C - CT) * H * W);
    const int to = PIXELS * e + row * (STRIDE - WIDE) + plane * (PLANE - HIGH * STRIDE) + MARGIN;
    const bool there = C % CT == 0 || plane % CT < many;
    return Move{at, to, there && (STRIPS == 1 || (y >= 0 && y < H))};
  });
}

#ifdef CONVOLVE

// out[l, n, f, y, x] = b[l, f] + Σ_{c, i, j} w[l, f, c, i, j] · in[l, n, c, y + i − PH, x + j − PW]
//
// Left are windows, a row a pixel, right are weights. A product is over the same tap of eight lines. A
// warp has EACH times eight runs and all filters. A block has YT rows of IMAGES images, and takes CT
// channels at a time. With TURNED, weights are those of the convolution whose gradient this is:
// w[l, c, f, KH − 1 − i, KW − 1 − j]. Weights and biases of lanes lie so many numbers apart, of which
// BESIDE can be moved at once.

constexpr int ALL = IMAGES * YT * RUNS, WARPS = (ALL + 8 * EACH - 1) / (8 * EACH), THREADS = 32 * WARPS;
constexpr int WINDOW = 4 + (KW - 1 + 3) / 4 * 4, LINES = (CT * KH + 7) / 8 * 8;
constexpr int CHANNEL = TAPS % 2 ? TAPS : TAPS + 1;  // Four channels of eight filters: in 32 banks.

struct alignas(8) Line {
  int pixel, weight;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(const float* __restrict__ in, const float* __restrict__ w,
             const float* __restrict__ b, float* __restrict__ out, int images, int w_apart,
             int b_apart) {
  alignas(16) __shared__ float pixels[IMAGES * CT * PLANE];
  alignas(16) __shared__ float weights[F * LINE];
  __shared__ Line places[LINES];
  static_assert(sizeof(pixels) + sizeof(weights) + sizeof(places) <= 48 * 1024);
  const long long lane = blockIdx.y;
  const int first = blockIdx.x / STRIPS * IMAGES, top = blockIdx.x % STRIPS * YT;
  const int count = smaller(IMAGES, images - first);
  const int t = threadIdx.x, warp = t / 32, group = t % 32 / 4, member = t % 4;
  in += (lane * images + first) * C * H * W;
  w += lane * w_apart;
  out += (lane * images + first) * F * OH * OW;
  if (MARGIN)
    for (int e = t; e < IMAGES * CT * PLANE / 4; e += THREADS)
      reinterpret_cast<Some<4>*>(pixels)[e] = Some<4>{};
  // Weights of the lines that fill up the last eight.
  for (int e = t; e < F * KW; e += THREADS) weights[e / KW * LINE + CT * CHANNEL + e % KW] = 0.f;

  int at[EACH], filter[RIGHTS];
#pragma unroll
  for (int u = 0; u < EACH; ++u) {
    const int run = (warp * EACH + u) * 8 + group, row = run / RUNS;
    at[u] = run < ALL ? row / YT * (CT * PLANE) + row % YT * STRIDE + run % RUNS * 4 : 0;
  }
  // Beyond the last filter it is the last again, and the sums are nobody's.
#pragma unroll
  for (int n = 0; n < RIGHTS; ++n) filter[n] = smaller(8 * n + group, F - 1) * LINE;
  float sum[EACH][2][RIGHTS][4];
#pragma unroll
  for (int n = 0; n < RIGHTS; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if BIAS
      const float start = b[lane * b_apart + smaller(8 * n + 2 * member + i % 2, F - 1)];
#else
      const float start = 0.f;
#endif
#pragma unroll
      for (int u = 0; u < EACH; ++u) sum[u][0][n][i] = sum[u][1][n][i] = start;
    }

  for (int channel = 0; channel < C; channel += CT) {
    const int many = C % CT ? smaller(CT, C - channel) : CT, lines = (many * KH + 7) / 8 * 8;
    __syncthreads();
    // What is filled up has weights of zero, and looks at pixels that count anyway. Lines beside each
    // other are of different channels.
    if (channel == 0 || C % CT)
      for (int line = t; line < lines; line += THREADS) {
        const int i = line / many, c = line % many;
        if (i < KH)
          places[line] = {c * PLANE + i * STRIDE, c * CHANNEL + (TURNED ? KH - 1 - i : i) * KW};
        else
          places[line] = {0, CT * CHANNEL};
      }
    bring_pixels<THREADS>(pixels, in + channel * (H * W), top, count, many);
    // As they lie in memory.
#if TURNED
    bring<1, THREADS>(weights, w + channel * F * TAPS, many * (F * TAPS), [](int e) {
      const int f = e / TAPS % F, c = e / (TAPS * F);
      return Move{e, f * LINE + c * CHANNEL + e % TAPS, true};
    });
#else
    constexpr int N = CHANNEL == TAPS && C % CT == 0 ? smaller(BESIDE, at_once(CT * TAPS)) : 1;
    bring<N, THREADS>(weights, w + channel * TAPS, F * CT * TAPS / N, [=](int e) {
      const int f = e / (CT * TAPS / N), c = N * e / TAPS;
      const int to = N * e + c * (CHANNEL - TAPS) + f * (LINE - CT * CHANNEL);
      return Move{N * e + f * ((C - CT) * TAPS), to, C % CT == 0 || c % CT < many};
    });
#endif
    __syncthreads();
#pragma unroll 1
    for (int line = member; line < lines; line += 8) {
      const Line near = places[line], far = places[line + 4];
      float window[EACH][2][WINDOW];
#pragma unroll
      for (int u = 0; u < EACH; ++u) {
        read<WINDOW>(window[u][0], pixels + at[u] + near.pixel);
        read<WINDOW>(window[u][1], pixels + at[u] + far.pixel);
      }
#pragma unroll
      for (int j = 0; j < KW; ++j) {
        float right[RIGHTS][2];
#pragma unroll
        for (int n = 0; n < RIGHTS; ++n) {
          right[n][0] = weights[filter[n] + near.weight + (TURNED ? KW - 1 - j : j)];
          right[n][1] = weights[filter[n] + far.weight + (TURNED ? KW - 1 - j : j)];
        }
#pragma unroll
        for (int u = 0; u < EACH; ++u)
#pragma unroll
          for (int x = 0; x < 4; x += 2) {
            const float left[4] = {window[u][0][x + j], window[u][0][x + j + 1],
                                   window[u][1][x + j], window[u][1][x + j + 1]};
#pragma unroll
            for (int n = 0; n < RIGHTS; ++n) add_product(sum[u][x / 2][n], left, right[n]);
          }
      }
    }
  }

#pragma unroll
  for (int u = 0; u < EACH; ++u) {
    const int run = (warp * EACH + u) * 8 + group, image = run / (YT * RUNS), y = top + run / RUNS % YT;
    if (image >= count || y >= OH) continue;
    const int x = run % RUNS * 4;
#pragma unroll
    for (int n = 0; n < RIGHTS; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int f = 8 * n + 2 * member + i;
        if (f >= F) continue;
        const int place = ((image * F + f) * OH + y) * OW + x;
#if OW % 4 == 0
        *reinterpret_cast<Some<4>*>(out + place) = Some<4>{
            {sum[u][0][n][i], sum[u][0][n][2 + i], sum[u][1][n][i], sum[u][1][n][2 + i]}};
#else
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if (x + k < OW) out[place + k] = sum[u][k / 2][n][k % 2 * 2 + i];
#endif
      }
  }
}

#else

// part[l, s, f, (c, i, j)] = Σ_{n in split s} Σ_{y, x} g[l, n, f, y, x] · in[l, n, c, y + i − PH, x + j − PW]
// part[l, s, f, C · KH · KW] = Σ g[l, n, f, y, x], the gradient of the bias
//
// Left are windows, a row a line and the last one ones, right are slopes. A product is over two pixels of
// four runs, which lie below each other. A warp has KT taps of 16 lines and all filters, of every R-th
// four runs. A block brings YT rows of one image at a time.

constexpr int ALL = C * TAPS + 1, ACROSS = (C * KH + 1 + 15) / 16, PARTS = (KW + KT - 1) / KT;
constexpr int WARPS = ACROSS * PARTS * R, THREADS = 32 * WARPS;
constexpr int WINDOW = 4 + (KT - 1 + 3) / 4 * 4, STEPS = (YT + 3) / 4 * RUNS;
constexpr int SLOPES = at_once(OW), SLOPE_ROW = RUNS % 2 ? 4 * RUNS : 4 * RUNS + 4;
constexpr int ONES = C * PLANE, STAGED = ONES + (YT + 3) / 4 * 4 * STRIDE, ROOM = STAGED + F * LINE;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    correlate(const float* __restrict__ in, const float* __restrict__ g,
              float* __restrict__ part, int images, int per_split, int splits) {
  alignas(16) __shared__ float room[ROOM > F * ALL ? ROOM : F * ALL];
  static_assert(sizeof(room) <= 48 * 1024);
  float* slopes = room + STAGED;
  const long long lane = blockIdx.y;
  const int split = blockIdx.x, t = threadIdx.x, warp = t / 32, group = t % 32 / 4, member = t % 4;
  const int first = warp % ACROSS * 16 + group, tap = warp / ACROSS % PARTS * KT;
  const int r = warp / (ACROSS * PARTS);
  const int begin = split * per_split, end = smaller(begin + per_split, images);
  in += lane * images * C * H * W;
  g += lane * images * F * OH * OW;
  // Zeros beside the image, and for pixels that fill up runs and rows.
  for (int e = t; e < ROOM; e += THREADS) room[e] = e >= ONES && e < STAGED ? 1.f : 0.f;

  int at[2], filter[RIGHTS];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = first + 8 * half;
    at[half] = line < C * KH    ? line / KH * PLANE + line % KH * STRIDE + tap
               : line == C * KH ? ONES
                                : 0;
  }
  // Beyond the last filter it is the last again, and the sums are nobody's.
#pragma unroll
  for (int n = 0; n < RIGHTS; ++n) filter[n] = smaller(8 * n + group, F - 1) * LINE;
  float sum[KT][RIGHTS][4];
#pragma unroll
  for (int j = 0; j < KT; ++j)
#pragma unroll
    for (int n = 0; n < RIGHTS; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[j][n][i] = 0.f;

  for (int n = begin; n < end; ++n) {
    for (int strip = 0; strip < STRIPS; ++strip) {
      const int top = strip * YT;
      __syncthreads();
      bring_pixels<THREADS>(room, in + (long long)n * C * H * W, top, 1, C);
      const float* from = g + (long long)n * F * OH * OW + top * OW;
      bring<SLOPES, THREADS>(slopes, from, F * YT * OW / SLOPES, [=](int e) {
        const int row = e / (OW / SLOPES), f = row / YT;
        const int to = SLOPES * e + row * (SLOPE_ROW - OW) + f * (LINE - YT * SLOPE_ROW);
        const bool there = OH % YT == 0 || top + row % YT < OH;
        return Move{SLOPES * e + f * ((OH - YT) * OW), to, there};
      });
      __syncthreads();
#pragma unroll 1
      for (int step = r; step < STEPS; step += R) {
        const int y = step / RUNS * 4 + member, x = step % RUNS * 4;
        float window[2][WINDOW], right[RIGHTS][4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
          read<WINDOW>(window[half], room + at[half] + y * STRIDE + x);
#pragma unroll
        for (int f = 0; f < RIGHTS; ++f) read<4>(right[f], slopes + filter[f] + y * SLOPE_ROW + x);
#pragma unroll
        for (int k = 0; k < 4; k += 2)
#pragma unroll
          for (int j = 0; j < KT; ++j) {
            const float left[4] = {window[0][k + j], window[1][k + j],
                                   window[0][k + j + 1], window[1][k + j + 1]};
#pragma unroll
            for (int f = 0; f < RIGHTS; ++f) add_product(sum[j][f], left, right[f] + k);
          }
      }
    }
  }

  // One after the other, those that have the same taps of other pixels.
#pragma unroll 1
  for (int turn = 0; turn < R; ++turn) {
    __syncthreads();
    if (turn != r) continue;
#pragma unroll
    for (int j = 0; j < KT; ++j)
#pragma unroll
      for (int n = 0; n < RIGHTS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int line = first + i / 2 * 8, f = 8 * n + 2 * member + i % 2;
          const bool there = line < C * KH ? tap + j < KW : line == C * KH && tap + j == 0;
          if (!there || f >= F) continue;
          float* to = room + f * ALL + line * KW + tap + j;
          *to = turn ? *to + sum[j][n][i] : sum[j][n][i];
        }
  }
  __syncthreads();
  part += (lane * splits + split) * F * ALL;
  for (int e = t; e < F * ALL; e += THREADS) part[e] = room[e];
}

#endif
