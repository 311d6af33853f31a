#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tests of native/ under builds with AddressSanitizer and UndefinedBehaviorSanitizer, and with ThreadSanitizer.
#
#   native/sanitize.sh [python]             any finding fails a test, or the run
#   native/sanitize.sh --build [python]     what is to be run, alone
#
# Python and torch are not instrumented: the sanitizer's runtime is loaded before them, and only our library is watched.
set -euo pipefail
cd "$(dirname "$0")/.."
only_build=""
if [ "${1:-}" = --build ]; then
    only_build=1
    shift
fi
python="${1:-.venv/bin/python}"
compiler="${CXX:-g++}"
unset MAKEFLAGS # those of a make that runs this beside something else, which the builds below are no part of
export PATH="$PATH:$(cd "$(dirname "$python")" && pwd)" # cmake, where the system has none

runtime() { "$compiler" -print-file-name="$1"; }

build() { # name, flags, -O1 or another
    cmake -S native -B "build/sanitize-$1" -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER="$compiler" \
        -DCMAKE_CXX_FLAGS="${3:--O1} -g1 -fno-omit-frame-pointer $2" -DCMAKE_SHARED_LINKER_FLAGS="$2" >/dev/null
    cmake --build "build/sanitize-$1" -j "$(nproc)" >/dev/null
}

tests() { # name, preloaded, files
    [ -z "$only_build" ] || return 0
    OFFLOAD_NATIVE="$PWD/build/sanitize-$1/liboffload_native.so" LD_PRELOAD="$2" OMP_NUM_THREADS=1 \
        ${no_aslr:-} "$python" -m pytest -q -p no:cacheprovider "${@:3}"
}

[ -e "$(runtime libasan.so)" ] && [ -e "$(runtime libtsan.so)" ] || { echo "no sanitizers with $compiler; skipped" >&2; exit 0; }

# Resident sizes of a process say nothing here: the sanitizers' own memory comes and goes in them. A hundred steps are as many
# times what other tests have watched once.
sizes="not thousands_of_times and not hundred_steps"

addresses() {
    export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
    # Optimizing what is watched so closely takes a compiler four times as long as all else here.
    build address "-fsanitize=address,undefined -fno-sanitize-recover=undefined" -O0
    tests address "$(runtime libasan.so) $(runtime libubsan.so)" tests/native -k "$sizes"
}

threads() {
    setarch -R true 2>/dev/null || { echo "addresses cannot be fixed here (setarch -R): ThreadSanitizer is left out" >&2; return 0; }
    export TSAN_OPTIONS="die_after_fork=0 report_signal_unsafe=0 ignore_noninstrumented_modules=1 exitcode=66"
    build thread "-fsanitize=thread"
    no_aslr="setarch -R" # ThreadSanitizer needs the addresses that it expects
    tests thread "$(runtime libtsan.so)" tests/native -k "$sizes and not omp and not cannot_be_used and not abi_version and not without_the_library"
}

# Beside each other; what the second says comes when both are through.
said="$(mktemp)"
trap 'rm -f "$said"' EXIT
addresses &
first=$!
threads >"$said" 2>&1 &
second=$!
failed=0
wait "$first" || failed=1
wait "$second" || failed=1
cat "$said"
exit "$failed"
