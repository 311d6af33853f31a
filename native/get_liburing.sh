#!/bin/sh
# Installs liburing's headers where they are missing and that can be done without a question. Never fails: without them
# the native core is built with its pread/pwrite engine alone.
set -u

have_liburing() {
    echo '#include <liburing.h>' | "${CXX:-c++}" -x c++ -E - >/dev/null 2>&1
}

have_liburing && exit 0
if command -v apt-get >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ]; then
        as_root=""
    elif sudo -n true 2>/dev/null; then
        as_root="sudo -n"
    else
        as_root="none"
    fi
    if [ "$as_root" != none ]; then
        echo "installing liburing-dev"
        $as_root apt-get install -y -qq liburing-dev >/dev/null 2>&1 ||
            { $as_root apt-get update -qq >/dev/null 2>&1 && $as_root apt-get install -y -qq liburing-dev >/dev/null 2>&1; }
    fi
fi
have_liburing || echo "notice: liburing.h not found (Debian: liburing-dev); building without io_uring"
exit 0
