// Calls the kernels for any CPU with what stdin holds, and writes what they give: see test_cpu_on_arm.py.
#include <cstdio>
#include <cstdlib>

static std::vector<char> read_array() { // an array behind the number of its bytes
    int64_t n = 0;
    if (fread(&n, 8, 1, stdin) != 1) exit(2);
    std::vector<char> bytes(n);
    if (n && fread(bytes.data(), 1, n, stdin) != (size_t)n) exit(2);
    return bytes;
}
template <class T> static T* pointer(std::vector<char>& bytes) { return bytes.empty() ? nullptr : (T*)bytes.data(); }
static void write_array(const std::vector<char>& bytes) { fwrite(bytes.data(), 1, bytes.size(), stdout); }

int main() {
    auto sizes = read_array();
    const int64_t* n = (const int64_t*)sizes.data();
    std::vector<char> x[9];
    for (auto& one : x) one = read_array();
    std::vector<char> out(*n), mass(n[1]);
#ifdef HEAD_DIM
    AttentionCall call{};
    call.q = pointer<void>(x[0]), call.k = pointer<void>(x[1]), call.v = pointer<void>(x[2]);
    call.k_scale = pointer<fp16>(x[3]), call.v_scale = pointer<fp16>(x[4]);
    call.k_low = pointer<uint8_t>(x[5]), call.v_low = pointer<uint8_t>(x[6]);
    call.pos = pointer<int64_t>(x[7]), call.index = pointer<int64_t>(x[8]);
    call.out = out.data(), call.mass = pointer<float>(mass);
    memcpy(&call.B, n + 2, 16 * sizeof *n); // from B on to k_dtype
    call.scale = 1 / sqrtf(HEAD_DIM), call.threads = 2;
    attention(&call);
#elif defined(SAMPLES)
    distributions_any(pointer<float>(x[0]), pointer<float>(x[1]), pointer<int64_t>(x[2]), pointer<double>(x[3]),
                      pointer<double>(x[4]), pointer<float>(out), n[2], n[3], 2);
#elif defined(DRAWS)
    draw_any(pointer<float>(x[0]), pointer<float>(x[1]), pointer<int64_t>(out), n[2], n[3], 2);
#else
    linear(pointer<bf16>(x[0]), pointer<void>(x[1]), pointer<void>(x[2]), pointer<float>(x[3]), pointer<bf16>(x[4]),
           (bf16*)out.data(), n[2], n[3], n[4], n[5], n[6], n[7], 2);
#endif
    write_array(out), write_array(mass);
}
