// SPDX-License-Identifier: Apache-2.0
// libFuzzer target for what reads bytes in native/: the kernels, the checksum and the file I/O, through the C ABI.
//
// Buffers are exactly as large as the call is told, so that AddressSanitizer sees one byte too many; every SIMD path must
// give the bits of the scalar one; what was written must be read back.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "offload.h"

namespace {

void require(bool holds) {
    if (!holds) std::abort();
}

// The input, taken from the front; zeros when it is used up.
class Input {
  public:
    Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

    template <typename T> T take() {
        T value{};
        const size_t count = size_ < sizeof value ? size_ : sizeof value;
        if (count > 0) std::memcpy(&value, data_, count);
        data_ += count;
        size_ -= count;
        return value;
    }

    int64_t below(int64_t limit) { return static_cast<int64_t>(take<uint32_t>()) % limit; }

    // `nbytes` bytes on the heap, at an address that is off by up to 15.
    std::vector<uint8_t> bytes(int64_t nbytes) {
        std::vector<uint8_t> filled(static_cast<size_t>(nbytes));
        for (uint8_t& byte : filled) byte = take<uint8_t>();
        filled.shrink_to_fit();
        return filled;
    }

  private:
    const uint8_t* data_;
    size_t size_;
};

int64_t width(int32_t dtype) { return dtype == OFFLOAD_F32 ? 4 : 2; }

offload_threads* pool() {
    static offload_threads* const made = [] {
        offload_threads* out = nullptr;
        require(offload_threads_create(2, &out) == 0);
        return out;
    }();
    return made;
}

constexpr int32_t kLevels[] = {OFFLOAD_SIMD_SCALAR, OFFLOAD_SIMD_AVX2, OFFLOAD_SIMD_AVX512, OFFLOAD_SIMD_NEON};

void convert(Input& input) {
    const int32_t from = static_cast<int32_t>(input.below(4)), to = static_cast<int32_t>(input.below(4));
    const int64_t numel = input.below(300);
    const std::vector<uint8_t> source = input.bytes(numel * width(from));
    std::vector<uint8_t> expected(static_cast<size_t>(numel * width(to)));
    require(offload_set_simd_level(OFFLOAD_SIMD_SCALAR) == 0);
    const int status = offload_convert(pool(), expected.data(), to, source.data(), from, numel);
    require(status == (from > 2 || to > 2 ? -EINVAL : 0) || numel == 0);
    for (const int32_t level : kLevels) {
        if (offload_set_simd_level(level) != 0) continue;
        std::vector<uint8_t> found(expected.size());
        require(offload_convert(pool(), found.data(), to, source.data(), from, numel) == status);
        // Of an fp32 NaN only that it is one is promised; 16-bit ones are canonical.
        require(status != 0 || to == OFFLOAD_F32 || found == expected);
    }
}

void ingest(Input& input) {
    const int32_t from = static_cast<int32_t>(input.below(3)), to = static_cast<int32_t>(input.below(3));
    const int64_t numel = input.below(9000), start = 64 * input.below(200);
    const int32_t accumulate = static_cast<int32_t>(input.below(2));
    const std::vector<uint8_t> source = input.bytes(numel * width(from));
    const std::vector<uint8_t> before = input.bytes(numel * width(to));
    const int64_t blocks = numel == 0 ? 0 : (start + numel - 1) / 4096 - start / 4096 + 1;
    for (const int32_t level : kLevels) {
        if (offload_set_simd_level(level) != 0) continue;
        std::vector<uint8_t> target = before;
        std::vector<double> sums(static_cast<size_t>(blocks));
        require(offload_gradient_ingest(pool(), target.data(), to, source.data(), from, numel, start, accumulate, sums.data(), nullptr) ==
                    0 ||
                numel == 0);
    }
}

// One array of a segment: there, or NULL where the input says so.
template <typename T> T* maybe(Input& input, std::vector<T>& array) { return input.below(8) ? array.data() : nullptr; }

// Every rule with every state format, whether it has the arrays that they ask for or not.
void update(Input& input) {
    const int64_t numel = input.below(200);
    const auto count = static_cast<size_t>(numel), groups = (count + OFFLOAD_SCALE_GROUP - 1) / OFFLOAD_SCALE_GROUP;
    offload_update_segment segment{};
    segment.numel = numel;
    segment.first_index = input.below(4) * (input.below(8) ? OFFLOAD_SCALE_GROUP : 1);
    segment.step = 1 + input.below(1000);
    segment.rounding_seed = input.take<uint64_t>();
    segment.lr = input.take<float>();
    segment.beta1 = input.take<uint16_t>() / 65536.0;
    segment.beta2 = input.take<uint16_t>() / 65536.0;
    segment.eps = 1e-8;
    segment.weight_decay = input.take<uint8_t>() / 256.0;
    segment.grad_factor = input.take<float>();
    segment.grad_dtype = static_cast<int32_t>(input.below(4));
    segment.values_dtype = static_cast<int32_t>(input.below(4));
    segment.state_format = static_cast<int32_t>(input.below(5));
    segment.rule = static_cast<int32_t>(input.below(5));
    segment.decoupled = static_cast<int32_t>(input.below(2));
    segment.nesterov = static_cast<int32_t>(input.below(2));
    const bool fp32 = segment.state_format == OFFLOAD_STATE_FP32;
    const int64_t moment = fp32 || segment.state_format == OFFLOAD_STATE_SPLIT ? 4 : segment.state_format == OFFLOAD_STATE_BF16 ? 2 : 1;
    std::vector<uint8_t> grad = input.bytes(numel * width(segment.grad_dtype));
    segment.grad = maybe(input, grad);
    // master, two moments, their scales, values
    const std::vector<uint8_t> before[] = {
        input.bytes(numel * (fp32 ? 4 : 2)),
        input.bytes(numel * moment),
        input.bytes(numel * moment),
        input.bytes(static_cast<int64_t>(groups)),
        input.bytes(static_cast<int64_t>(groups)),
        input.bytes(numel * (fp32 ? width(segment.values_dtype) : 2)),
    };
    bool there[6];
    for (bool& one : there) one = input.below(4) != 0;
    int scalar = 0;
    for (const int32_t level : kLevels) {
        if (offload_set_simd_level(level) != 0) continue;
        std::vector<uint8_t> state[6];
        for (int i = 0; i < 6; ++i) state[i] = before[i];
        segment.master = there[0] ? state[0].data() : nullptr;
        segment.exp_avg = there[1] ? state[1].data() : nullptr;
        segment.exp_avg_sq = there[2] ? state[2].data() : nullptr;
        segment.exp_avg_scale = there[3] ? state[3].data() : nullptr;
        segment.exp_avg_sq_scale = there[4] ? state[4].data() : nullptr;
        segment.values = there[5] ? state[5].data() : nullptr;
        uint64_t sums[2] = {}, found[2] = {}, expected[2] = {}; // of at most one block
        const auto nbytes = static_cast<int64_t>(state[1].size());
        const offload_summed_memory summed = {state[1].data(), nbytes, &sums[0], &sums[1]};
        require(offload_checksum(state[1].data(), nbytes, nullptr, &expected[0]) == 0);
        const int status = offload_update_summed(pool(), &segment, 1, &summed, 1);
        if (level == OFFLOAD_SIMD_SCALAR) scalar = status;
        require(status == scalar && (status == 0 || status == -EINVAL));
        if (status != 0) continue;
        require(offload_checksum(state[1].data(), nbytes, nullptr, &expected[1]) == 0);
        for (int i = 0; i < 2; ++i) require(offload_checksum_of_blocks(&sums[i], nbytes, &found[i]) == 0 && found[i] == expected[i]);
    }
}

void checksum(Input& input) {
    std::vector<uint8_t> bytes = input.bytes(input.below(500));
    uint64_t before = 0, after = 0;
    require(offload_checksum(bytes.data(), static_cast<int64_t>(bytes.size()), nullptr, &before) == 0);
    if (bytes.empty()) return;
    bytes[static_cast<size_t>(input.below(static_cast<int64_t>(bytes.size())))] ^= static_cast<uint8_t>(1 + input.below(255));
    require(offload_checksum(bytes.data(), static_cast<int64_t>(bytes.size()), nullptr, &after) == 0);
    require(before != after);
}

void file(Input& input) {
    offload_io* io = nullptr;
    const int32_t kind = static_cast<int32_t>(input.below(2));
    if (offload_io_create(kind, static_cast<int32_t>(1 + input.below(8)), 512 * (1 + input.below(4)), &io) != 0) return;
    const int fileno = memfd_create("fuzz", MFD_CLOEXEC);
    require(fileno >= 0);
    const std::vector<uint8_t> written = input.bytes(input.below(6000));
    const int64_t nbytes = static_cast<int64_t>(written.size()), offset = input.below(5000);
    uint64_t ticket = 0;
    offload_io_result result{};
    require(offload_io_submit(io, OFFLOAD_IO_WRITE, fileno, const_cast<uint8_t*>(written.data()), nbytes, offset, 0, &ticket) == 0);
    require(offload_io_wait(io, ticket, -1, &result) == 0 && result.status == 0 && result.transferred_nbytes == nbytes);
    std::vector<uint8_t> read(written.size());
    const int64_t beyond = input.below(2) * input.below(64); // asks for more than there is
    read.resize(read.size() + static_cast<size_t>(beyond));
    const int64_t wanted = static_cast<int64_t>(read.size());
    require(offload_io_submit(io, OFFLOAD_IO_READ, fileno, read.data(), wanted, offset, 1, &ticket) == 0);
    require(offload_io_wait(io, ticket, -1, &result) == 0);
    require(result.status == (beyond > 0 ? -ENODATA : 0) && result.transferred_nbytes == nbytes);
    require(std::equal(written.begin(), written.end(), read.begin()));
    const int status = offload_io_submit(io, input.take<int32_t>(), fileno, nullptr, input.take<int64_t>() | INT64_MIN,
                                         input.take<int64_t>(), input.take<int32_t>(), &ticket);
    require(status == 0 || status == -EINVAL); // 0: an fdatasync
    require(offload_io_destroy(io) == 0);
    close(fileno);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Input input(data, size);
    switch (input.below(5)) {
    case 0: convert(input); break;
    case 1: ingest(input); break;
    case 2: update(input); break;
    case 3: checksum(input); break;
    default: file(input); break;
    }
    return 0;
}
