#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Coverage-guided fuzzing of what reads bytes in native/, under ASan and UBSan. Needs clang.
#
#   native/fuzz.sh [seconds]     a finding ends it with an error, the input that shows it is named
set -euo pipefail
cd "$(dirname "$0")/.."
seconds="${1:-60}"
command -v clang++ >/dev/null || { echo "clang++ was not found: apt-get install clang" >&2; exit 1; }
folder="build/fuzz"
cmake -S native -B "$folder" -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER=clang++ \
    -DCMAKE_CXX_FLAGS="-O1 -g1 -fno-omit-frame-pointer -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined" \
    -DCMAKE_SHARED_LINKER_FLAGS="-fsanitize=address,undefined -Wl,--unresolved-symbols=ignore-all" >/dev/null
cmake --build "$folder" -j "$(nproc)" >/dev/null
clang++ -std=c++17 -O1 -g1 -Inative/include -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
    native/fuzz/bytes.cpp -o "$folder/bytes" -L"$folder" -loffload_native -Wl,-rpath,"$PWD/$folder"
mkdir -p "$folder/corpus"
ASAN_OPTIONS=detect_leaks=0 "$folder/bytes" -max_total_time="$seconds" -max_len=8192 -print_final_stats=1 \
    -artifact_prefix="$folder/" "$folder/corpus"
