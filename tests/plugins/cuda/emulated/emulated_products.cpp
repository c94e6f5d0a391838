// A libcublasLt.so.13 without a GPU: what ingot calls, column-major as in the original, on the emulated driver's queue.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>

namespace {

enum { kSuccess = 0, kInvalid = 7, kNotSupported = 15 };
enum { kFloat = 0, kHalf = 2, kBfloat = 14, kCompute32 = 68 };

struct Description {
  int compute, scale, transposed_a = 0, transposed_b = 0;
};
struct Layout {
  int type;
  uint64_t rows, cols;
  int64_t stride;
  size_t width() const { return type == kFloat ? 4 : 2; }
  size_t bytes() const { return (static_cast<size_t>(stride) * (cols - 1) + rows) * width(); }
};
struct Preference {
  uint64_t workspace = 0;
  uint32_t alignment[4] = {256, 256, 256, 256};
};
struct Heuristic {
  uint64_t algo[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

int held = 0;  // handles and descriptors that nobody gave back

template <class T>
T made(T what) {
  held += 1;
  return what;
}
template <class T>
int given_back(void* what) {
  held -= 1;
  delete static_cast<T*>(what);
  return kSuccess;
}

template <class T>
T driver(const char* name) {
  return reinterpret_cast<T>(dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name));
}

float load(const void* data, size_t index, int type) {
  if (type == kFloat) return static_cast<const float*>(data)[index];
  if (type == kHalf) return static_cast<float>(static_cast<const _Float16*>(data)[index]);
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[index]) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
void store(void* data, size_t index, float value, int type) {
  if (type == kFloat) {
    static_cast<float*>(data)[index] = value;
  } else if (type == kHalf) {
    static_cast<_Float16*>(data)[index] = static_cast<_Float16>(value);
  } else {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

// Whether d[m, n] = op(a) op(b) + c fits together.
bool fits(const Description& how, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const uint64_t m = how.transposed_a ? a.cols : a.rows, k = how.transposed_a ? a.rows : a.cols;
  const uint64_t n = how.transposed_b ? b.rows : b.cols, other = how.transposed_b ? b.cols : b.rows;
  return k == other && d.rows == m && d.cols == n && c.rows == m && c.cols == n && a.type == b.type &&
         c.type == d.type && (d.type == a.type || d.type == kFloat) && how.compute == kCompute32 && how.scale == kFloat;
}

}  // namespace

extern "C" {

int cublasLtCreate(void** handle) {
  *handle = made(new int(13));
  return kSuccess;
}
int cublasLtDestroy(void* handle) { return given_back<int>(handle); }
int emulated_products_held() { return held; }
int cublasLtMatmulDescCreate(void** to, int compute, int scale) {
  *to = made(new Description{compute, scale});
  return kSuccess;
}
int cublasLtMatmulDescDestroy(void* description) { return given_back<Description>(description); }
int cublasLtMatmulDescSetAttribute(void* description, int attribute, const void* value, size_t bytes) {
  if (bytes != 4 || (attribute != 3 && attribute != 4)) return kInvalid;
  auto* how = static_cast<Description*>(description);
  std::memcpy(attribute == 3 ? &how->transposed_a : &how->transposed_b, value, 4);
  return kSuccess;
}
int cublasLtMatrixLayoutCreate(void** to, int type, uint64_t rows, uint64_t cols, int64_t stride) {
  if (stride < static_cast<int64_t>(rows)) return kInvalid;
  *to = made(new Layout{type, rows, cols, stride});
  return kSuccess;
}
int cublasLtMatrixLayoutDestroy(void* layout) { return given_back<Layout>(layout); }
int cublasLtMatmulPreferenceCreate(void** to) {
  *to = made(new Preference);
  return kSuccess;
}
int cublasLtMatmulPreferenceDestroy(void* preference) { return given_back<Preference>(preference); }
int cublasLtMatmulPreferenceSetAttribute(void* to, int attribute, const void* value, size_t bytes) {
  auto* preference = static_cast<Preference*>(to);
  if (attribute == 1 && bytes == 8) {
    std::memcpy(&preference->workspace, value, 8);
  } else if (attribute >= 5 && attribute <= 8 && bytes == 4) {
    std::memcpy(&preference->alignment[attribute - 5], value, 4);
  } else {
    return kInvalid;
  }
  return kSuccess;
}
int cublasLtMatmulAlgoGetHeuristic(void*, const Description* how, const Layout* a, const Layout* b, const Layout* c,
                                   const Layout* d, const Preference* preference, int wanted, Heuristic* result,
                                   int* found) {
  *found = 0;
  if (wanted < 1 || !fits(*how, *a, *b, *c, *d)) return kInvalid;
  std::memset(result, 0, sizeof *result);
  // The algorithm keeps what it was chosen for: alignments are held by the call, the workspace too.
  for (int i = 0; i < 4; ++i) result->algo[i] = preference->alignment[i];
  result->algo[4] = preference->workspace;
  result->workspace = preference->workspace;
  *found = 1;
  return kSuccess;
}
int cublasLtMatmul(void*, const Description* how, const float* alpha, const void* a, const Layout* a_layout,
                   const void* b, const Layout* b_layout, const float* beta, const void* c, const Layout* c_layout,
                   void* d, const Layout* d_layout, const uint64_t* algo, void* workspace, size_t workspace_bytes,
                   void*) {
  static const auto inside = driver<bool (*)(uintptr_t, size_t)>("emulated_inside");
  static const auto enqueue = driver<void (*)(std::function<int()>)>("emulated_enqueue");
  const Layout la = *a_layout, lb = *b_layout, lc = *c_layout, ld = *d_layout;
  if (!fits(*how, la, lb, lc, ld) || workspace_bytes < algo[4]) return kInvalid;
  const void* pointers[] = {a, b, c, d};
  const Layout* layouts[] = {&la, &lb, &lc, &ld};
  for (int i = 0; i < 4; ++i) {
    const auto address = reinterpret_cast<uintptr_t>(pointers[i]);
    if (address % algo[i] || !inside(address, layouts[i]->bytes())) return kNotSupported;
  }
  if (!inside(reinterpret_cast<uintptr_t>(workspace), workspace_bytes)) return kNotSupported;
  const Description description = *how;
  const float scale = *alpha, keep = *beta;
  enqueue([=] {
    const uint64_t k = description.transposed_a ? la.rows : la.cols;
    for (uint64_t j = 0; j < ld.cols; ++j) {
      for (uint64_t i = 0; i < ld.rows; ++i) {
        double sum = 0;
        for (uint64_t l = 0; l < k; ++l) {
          const uint64_t at_a = description.transposed_a ? l + i * la.stride : i + l * la.stride;
          const uint64_t at_b = description.transposed_b ? j + l * lb.stride : l + j * lb.stride;
          sum += static_cast<double>(load(a, at_a, la.type)) * load(b, at_b, lb.type);
        }
        float value = scale * static_cast<float>(sum);
        if (keep != 0) value += keep * load(c, i + j * lc.stride, lc.type);
        store(d, i + j * ld.stride, value, ld.type);
      }
    }
    return 0;
  });
  return kSuccess;
}
}
