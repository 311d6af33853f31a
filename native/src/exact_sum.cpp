// SPDX-License-Identifier: Apache-2.0
// Exact sums of doubles: what is added to one number of 2240 bits, in units of the smallest double, needs no rounding.
#include <cerrno>
#include <cstring>

#include "offload.h"

namespace offload {
namespace {

constexpr int kDigitBits = 32;
constexpr int kMantissaBits = 52;
constexpr uint64_t kExponentMask = 0x7ff;
// Each value adds less than 2^32 in magnitude to a digit, so that this many need no carry in between.
constexpr int64_t kValuesPerCarry = int64_t{1} << 30;

// Digits in base 2^32, the lowest first; between carries each is any signed number.
struct Total {
    int64_t digits[OFFLOAD_EXACT_SUM_DIGITS] = {};

    void add(double value) {
        uint64_t bits = 0;
        std::memcpy(&bits, &value, sizeof bits);
        const uint64_t exponent = bits >> kMantissaBits & kExponentMask;
        const uint64_t fraction = bits & ((uint64_t{1} << kMantissaBits) - 1);
        const uint64_t mantissa = exponent == 0 ? fraction : fraction | uint64_t{1} << kMantissaBits;
        const uint64_t shift = exponent == 0 ? 0 : exponent - 1; // of the mantissa, in units of 2^-1074
        const unsigned __int128 wide = static_cast<unsigned __int128>(mantissa) << (shift % kDigitBits);
        int64_t* at = digits + shift / kDigitBits;
        const int64_t sign = bits >> 63 != 0 ? -1 : 1;
        for (int i = 0; i < 3; ++i) at[i] += sign * static_cast<int64_t>(static_cast<uint32_t>(wide >> (i * kDigitBits)));
    }

    void carry() {
        int64_t over = 0;
        for (int64_t& digit : digits) {
            const int64_t sum = digit + over;
            over = sum >> kDigitBits; // rounds down: what is left is not negative
            digit = sum & 0xffffffff;
        }
        digits[OFFLOAD_EXACT_SUM_DIGITS - 1] += over * (int64_t{1} << kDigitBits); // the sign
    }
};

bool is_finite(double value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    return (bits >> kMantissaBits & kExponentMask) != kExponentMask;
}

} // namespace
} // namespace offload

extern "C" int offload_exact_sum(const double* const* arrays, const int64_t* counts, int64_t array_count, uint32_t* digits) {
    using namespace offload;
    if (array_count < 0 || digits == nullptr || (array_count > 0 && (arrays == nullptr || counts == nullptr))) return -EINVAL;
    for (int64_t i = 0; i < array_count; ++i) {
        if (counts[i] < 0 || (counts[i] > 0 && arrays[i] == nullptr)) return -EINVAL;
    }
    Total total;
    int64_t until_carry = kValuesPerCarry;
    for (int64_t i = 0; i < array_count; ++i) {
        for (int64_t j = 0; j < counts[i]; ++j) {
            if (!is_finite(arrays[i][j])) return -EDOM;
            if (--until_carry == 0) {
                total.carry();
                until_carry = kValuesPerCarry;
            }
            total.add(arrays[i][j]);
        }
    }
    total.carry();
    for (int i = 0; i < OFFLOAD_EXACT_SUM_DIGITS; ++i) digits[i] = static_cast<uint32_t>(total.digits[i]);
    return 0;
}
