// Convolutions of lanes with few channels, each lane with weights of its own, in single precision.
//
// A block brings pixels and weights into shared memory once; a thread keeps a tile of results in
// registers and uses each number it reads many times. Compiled for one shape at a time: all names in
// capitals are numbers that stand before this text (see direct_conv.py).
//
// Rows in shared memory lie an odd number of quadruples apart: eight neighbouring rows, read four
// numbers at a time, are then in different banks.

#ifdef CONVOLVE
constexpr int registers = 128;  // Of a thread: fewer let more be in flight, until some are put away.
constexpr int ahead = 4;        // How often a thread asks for numbers from memory before it waits.
#else
constexpr int registers = 96;
constexpr int ahead = 2;
#endif

struct alignas(16) Four {
  float v[4];
};

struct alignas(8) Two {
  float v[2];
};

// As few reads as there can be: what they bring is what shared memory is slow at.
__device__ inline void read(float* into, const float* from, int count) {
#pragma unroll
  for (int q = 0; q < count / 4; ++q) {
    const Four four = reinterpret_cast<const Four*>(from)[q];
#pragma unroll
    for (int i = 0; i < 4; ++i) into[4 * q + i] = four.v[i];
  }
  const int left = count / 4 * 4;
  if (count % 4 >= 2) {
    const Two two = *reinterpret_cast<const Two*>(from + left);
    into[left] = two.v[0];
    into[left + 1] = two.v[1];
  }
  if (count % 2) into[count - 1] = from[count - 1];
}

// How many blocks of so many threads are at work at a time where each thread has so many registers.
__host__ __device__ constexpr int blocks_of(int threads) {
  const int blocks = 65536 / (registers * ((threads + 31) / 32 * 32));
  return blocks > 1 ? blocks : 1;
}

// Four pixels of an image beside each other; zero where they lie beside it.
__device__ inline Four pixels_at(const float* plane, int row, int column) {
  Four four = {{0.f, 0.f, 0.f, 0.f}};
  if (row < 0 || row >= H) return four;
#if W % 4 == 0 && PW % 4 == 0
  if (column >= 0 && column < W) four = *reinterpret_cast<const Four*>(plane + row * W + column);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (column + i >= 0 && column + i < W) four.v[i] = plane[row * W + column + i];
#endif
  return four;
}

#ifdef CONVOLVE

// out[l, n, f, y, x] = b[l, f] + Σ_{c, i, j} w[l, f, c, i, j] · in[l, n, c, y + i − PH, x + j − PW]
//
// A thread has FT filters of XT pixels beside each other. A block has YT rows of IMAGES images, and
// takes CT channels at a time. With TURNED, weights are those of the convolution whose gradient this
// is: w[l, c, f, KH − 1 − i, KW − 1 − j]. Weights and biases of lanes lie so many numbers apart.

constexpr int PARTS = (OW + XT - 1) / XT, GROUPS = (F + FT - 1) / FT;
constexpr int ROWS = YT + KH - 1, WINDOW = (XT + KW - 1 + 3) / 4, FP = (FT + 3) / 4 * 4;
constexpr int STRIDE = ((PARTS - 1) * XT + 4 * WINDOW) / 4 % 2 ? (PARTS - 1) * XT + 4 * WINDOW
                                                               : (PARTS - 1) * XT + 4 * WINDOW + 4;
constexpr int PLANES = CT * ROWS * STRIDE, EACH = PARTS * YT * GROUPS, THREADS = IMAGES * EACH;
constexpr int STRIPS = (OH + YT - 1) / YT;

extern "C" __global__ void __launch_bounds__(THREADS, blocks_of(THREADS))
    convolve(const float* __restrict__ in, const float* __restrict__ w,
             const float* __restrict__ b, float* __restrict__ out, int images, int w_apart,
             int b_apart) {
  alignas(16) __shared__ float pixels[IMAGES * PLANES];
  alignas(16) __shared__ float weights[CT][KH][KW][GROUPS][FP];
  const long long lane = blockIdx.y;
  const int first = blockIdx.x / STRIPS * IMAGES, top = blockIdx.x % STRIPS * YT;
  const int t = threadIdx.x, part = t % PARTS, y = t / PARTS % YT;
  const int group = t / (PARTS * YT) % GROUPS, mine = t / EACH;
  in += lane * images * C * H * W;
  w += lane * w_apart;
  out += lane * images * F * OH * OW;

  float sum[FT][XT];
#pragma unroll
  for (int f = 0; f < FT; ++f) {
#if BIAS
    const float start = group * FT + f < F ? b[lane * b_apart + group * FT + f] : 0.f;
#else
    const float start = 0.f;
#endif
#pragma unroll
    for (int x = 0; x < XT; ++x) sum[f][x] = start;
  }

  for (int channel = 0; channel < C; channel += CT) {
    if (channel) __syncthreads();
#pragma unroll ahead
    for (int e = t; e < IMAGES * PLANES / 4; e += THREADS) {
      const int q = e % (STRIDE / 4), row = e / (STRIDE / 4) % ROWS;
      const int c = e / (STRIDE / 4 * ROWS) % CT, image = e / (PLANES / 4), n = first + image;
      Four four = {{0.f, 0.f, 0.f, 0.f}};
      if (channel + c < C && n < images)
        four = pixels_at(in + ((long long)n * C + channel + c) * (H * W), top + row - PH, 4 * q - PW);
      *reinterpret_cast<Four*>(pixels + 4 * e) = four;
    }
    // As they lie in memory; filters and channels beyond the last are nobody's.
#if TURNED
    const int many = (C - channel < CT ? C - channel : CT) * F * KH * KW;
#else
    const int many = F * CT * KH * KW;
#endif
#pragma unroll ahead
    for (int e = t; e < many; e += THREADS) {
#if TURNED
      const int k = e % (KH * KW), filter = e / (KH * KW) % F, c = e / (KH * KW * F);
      const int tap = c * (KH * KW) + KH * KW - 1 - k;
      const float weight = w[channel * F * KH * KW + e];
#else
      const int tap = e % (CT * KH * KW), filter = e / (CT * KH * KW);
      const bool there = C % CT == 0 || channel + tap / (KH * KW) < C;
      const float weight = there ? w[(filter * C + channel) * (KH * KW) + tap] : 0.f;
#endif
      (&weights[0][0][0][0][0])[(tap * GROUPS + filter / FT) * FP + filter % FT] = weight;
    }
    __syncthreads();
#pragma unroll 1
    for (int c = 0; c < CT; ++c) {
#pragma unroll
      for (int i = 0; i < KH; ++i) {
        float row[4 * WINDOW];
        read(row, pixels + mine * PLANES + (c * ROWS + y + i) * STRIDE + part * XT, 4 * WINDOW);
#pragma unroll
        for (int j = 0; j < KW; ++j) {
          float tap[FP];
          read(tap, weights[c][i][j][group], FT);
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
constexpr int TAPS = C * KH * KW + 1, STRIPS = (OH + YT - 1) / YT;
constexpr int THREADS = C * KH * R * GROUPS, ALL = THREADS * FT * KW + R * GROUPS * FT;
constexpr int STAGED = C * ROWS * STRIDE + GROUPS * FT * YT * GSTRIDE;

extern "C" __global__ void __launch_bounds__(THREADS, blocks_of(THREADS))
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
#pragma unroll ahead
      for (int e = t; e < C * (YT + KH - 1) * (STRIDE / 4); e += THREADS) {
        const int q = e % (STRIDE / 4), row = e / (STRIDE / 4) % (YT + KH - 1);
        const int at = e / (STRIDE / 4 * (YT + KH - 1));
        *reinterpret_cast<Four*>(pixels + (at * ROWS + row) * STRIDE + 4 * q) =
            pixels_at(in + ((long long)n * C + at) * (H * W), top + row - PH, 4 * q - PW);
      }
#pragma unroll ahead
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
        read(window, row, 4 * TAIL);
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
          read(window + 4 * TAIL, row + 4 * (q + TAIL), 4);
#pragma unroll
          for (int f = 0; f < FT; ++f) {
            float slope[4];
            read(slope, slopes + ((group * FT + f) * YT + y) * GSTRIDE + 4 * q, 4);
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
