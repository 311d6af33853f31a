#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel.sh PYTHON ARCHITECTURE: builds dist/offload-*-manylinux_2_28_ARCHITECTURE.whl (x86_64 or aarch64), on any Linux and for either.
# The compiler is zig's, from its Python package: it knows every glibc, and brings the sources of a C++ library.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1") architecture=$2 tag=manylinux_2_28_$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

folder=$("$python" -c 'import os, ziglang; print(os.path.dirname(ziglang.__file__))')
# Whoever links (cmake's trials too) does it without zig's C++ library: native/zig_runtime.cmake has what is used of it. All link with
# the same flags, as zig compiles the rest of its run-time library once for each set of them.
cat >"$work/c++" <<END
#!/bin/sh
case " \$* " in *" -c "*) ;; *) set -- "\$@" -Os -s -nostdlib++ -lunwind ;; esac
exec "$folder/zig" c++ -target $architecture-linux-gnu.2.28 "\$@"
END
for tool in ar ranlib; do printf '#!/bin/sh\nexec "%s/zig" %s "$@"\n' "$folder" "$tool" >"$work/$tool"; done
chmod +x "$work/c++" "$work/ar" "$work/ranlib"
# -s: zig writes debug information unless told not to. -O3: what is not optimized it checks for undefined behaviour.
export CXX="$work/c++" CXXFLAGS="-O3 -s -fPIC" _PYTHON_HOST_PLATFORM="linux-$architecture" CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-$(nproc)}"
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/wheel" . \
    -C build-dir="$work/build" -C cmake.define.CMAKE_SYSTEM_NAME=Linux -C cmake.define.CMAKE_SYSTEM_PROCESSOR="$architecture" \
    -C cmake.define.CMAKE_AR="$work/ar" -C cmake.define.CMAKE_RANLIB="$work/ranlib" -C cmake.define.OFFLOAD_ZIG_LIB="$folder/lib"
mkdir -p dist
rm -f dist/offload-*-"$tag".whl
# auditwheel refuses a library that needs more than the tag promises.
# It offers the tags of the machine that it runs on alone, so it is told that this is the other one.
"$python" -c "import platform, runpy; platform.machine = lambda: '$architecture'; runpy.run_module('auditwheel', run_name='__main__')" \
    repair --plat "$tag" --only-plat --wheel-dir dist "$work"/wheel/*.whl
