#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel.sh PYTHON ARCHITECTURE: builds dist/offload-*-manylinux_2_28_ARCHITECTURE.whl (x86_64 or aarch64), on any Linux and for either.
# The compiler is zig's, from its Python package: it knows every glibc, and links the C++ library into ours.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1") architecture=$2 tag=manylinux_2_28_$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for tool in "c++" "ar" "ranlib"; do
    target=
    [ "$tool" != "c++" ] || target="-target $architecture-linux-gnu.2.28"
    printf '#!/bin/sh\nexec "%s" -m ziglang %s %s "$@"\n' "$python" "$tool" "$target" >"$work/$tool"
    chmod +x "$work/$tool"
done
# zig compiles its C++ library once for each set of these flags, for cmake's trials too, and writes debug information unless told to strip.
export CXX="$work/c++" CXXFLAGS="-O3 -s -fPIC" _PYTHON_HOST_PLATFORM="linux-$architecture" CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-$(nproc)}"
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/wheel" . \
    -C build-dir="$work/build" -C cmake.define.CMAKE_SYSTEM_NAME=Linux -C cmake.define.CMAKE_SYSTEM_PROCESSOR="$architecture" \
    -C cmake.define.CMAKE_AR="$work/ar" -C cmake.define.CMAKE_RANLIB="$work/ranlib"
mkdir -p dist
rm -f dist/offload-*-"$tag".whl
# auditwheel refuses a library that needs more than the tag promises.
# It offers the tags of the machine that it runs on alone, so it is told that this is the other one.
"$python" -c "import platform, runpy; platform.machine = lambda: '$architecture'; runpy.run_module('auditwheel', run_name='__main__')" \
    repair --plat "$tag" --only-plat --wheel-dir dist "$work"/wheel/*.whl
