// Calls the kernels for any CPU with what stdin holds, and writes what they give: see test_cpu_on_arm.py.
#include <cstdio>
#include <cstdlib>

static std::vector<char> take() { // an array behind the number of its bytes
    int64_t n = 0;
    if (fread(&n, 8, 1, stdin) != 1) exit(2);
    std::vector<char> bytes(n);
    if (n && fread(bytes.data(), 1, n, stdin) != (size_t)n) exit(2);
    return bytes;
}
static char* pointer(std::vector<char>& bytes) { return bytes.empty() ? nullptr : bytes.data(); }
static void give(const std::vector<char>& bytes) { fwrite(bytes.data(), 1, bytes.size(), stdout); }

int main() {
    auto named = take();
    const int64_t* n = (const int64_t*)named.data();
    std::vector<char> x[9];
    for (auto& one : x) one = take();
    std::vector<char> out(*n), mass(n[1]);
#ifdef HEAD_DIM
    attend_any(pointer(x[0]), pointer(x[1]), pointer(x[2]), (fp16*)pointer(x[3]), (fp16*)pointer(x[4]), (uint8_t*)pointer(x[5]), (uint8_t*)pointer(x[6]), (int64_t*)pointer(x[7]), (int64_t*)pointer(x[8]),
               out.data(), (float*)pointer(mass), n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14], n[15], n[16], n[17], 1 / sqrtf(HEAD_DIM), 2);
#elif defined(SAMPLES)
    distributions_any((float*)pointer(x[0]), (float*)pointer(x[1]), (int64_t*)pointer(x[2]), (double*)pointer(x[3]), (double*)pointer(x[4]), (float*)pointer(out), n[2], n[3], 2);
#elif defined(DRAWS)
    draw_any((float*)pointer(x[0]), (float*)pointer(x[1]), (int64_t*)pointer(out), n[2], n[3], 2);
#else
    linear_any((bf16*)pointer(x[0]), pointer(x[1]), pointer(x[2]), (float*)pointer(x[3]), (bf16*)pointer(x[4]), (bf16*)out.data(), n[2], n[3], n[4], n[5], n[6], n[7], 2);
#endif
    give(out), give(mass);
}
