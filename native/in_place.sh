#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# in_place.sh PYTHON: builds the native library and the CUDA kernels beside the package, for a Python that has torch and is
# to stay as it is. Needs a C++ compiler, takes cmake where it is, fetches nothing. Run from the root of the checkout.
set -eu
python=$1
library=offload/liboffload_native.so

built() {
    [ -e "$library" ] && [ -z "$(find native offload/device/arithmetic/cuda_kernels -type f -newer "$library" | head -n 1)" ]
}

with_cmake() {
    "$@" -S native -B build/in-place -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")" -DOFFLOAD_CUDA_KERNELS=ON
    "$@" --build build/in-place --parallel --target offload_native
    "$@" --build build/in-place --target offload_cuda_kernels && cp build/in-place/offload_cuda_kernels.*[bn] offload/ ||
        echo "offload: no CUDA kernels were built"
    cp build/in-place/liboffload_native.so "$library.new"
}

# The flags are those of native/CMakeLists.txt.
with_compiler_alone() {
    sources=$(ls native/src/*.cpp | grep -v -e kernels_avx -e kernels_neon)
    define=
    objects=$(mktemp -d)
    trap 'rm -rf "$objects"' EXIT
    flags="-std=c++17 -O3 -DNDEBUG -fPIC -pthread -fvisibility=hidden -fvisibility-inlines-hidden -ffp-contract=off -fno-math-errno"
    flags="$flags -Inative/include -Inative/src"
    case $(uname -m) in
    x86_64 | amd64)
        define=-DOFFLOAD_HAVE_X86
        $cxx $flags $define -mavx2 -mfma -mf16c -c native/src/kernels_avx2.cpp -o "$objects/avx2.o"
        $cxx $flags $define -mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c -c native/src/kernels_avx512.cpp \
            -o "$objects/avx512.o"
        ;;
    aarch64 | arm64)
        define=-DOFFLOAD_HAVE_NEON
        sources="$sources native/src/kernels_neon.cpp"
        ;;
    esac
    for source in $sources; do $cxx $flags $define -c "$source" -o "$objects/$(basename "$source").o"; done
    $cxx -shared -pthread -Wl,--version-script=native/exports.map -Wl,--no-undefined "$objects"/*.o -o "$library.new"
    kernels=offload/device/arithmetic/cuda_kernels/kernels.cu
    nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
    if [ -n "$nvcc" ]; then
        "$nvcc" -fatbin -arch=all-major -std=c++17 -fmad=false -ftz=false -prec-div=true -prec-sqrt=true -allow-unsupported-compiler \
            --threads 0 -o offload/offload_cuda_kernels.fatbin $kernels || echo "offload: nvcc failed, the CUDA kernels are not built"
    else
        "$python" native/compile_kernels.py $kernels offload || echo "offload: the CUDA kernels are not built"
    fi
}

built && exit 0
cxx=${CXX:-c++}
if ! command -v "$cxx" >/dev/null; then
    echo "offload: no C++ compiler: torch does the arithmetic, with the same bits, slowly" >&2
elif command -v cmake >/dev/null; then
    with_cmake cmake
elif "$python" -m cmake --version >/dev/null 2>&1; then
    with_cmake "$python" -m cmake
else
    with_compiler_alone
fi
[ ! -e "$library.new" ] || mv "$library.new" "$library"
