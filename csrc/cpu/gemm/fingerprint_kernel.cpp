// The checksum of a line is the universal hash NH of UMAC (Black, Halevi, Krawczyk, Krovetz,
// Rogaway: UMAC: Fast and Secure Message Authentication, 1999): the sum of products of pairs of
// 32-bit words, with a key added to each word. Two different lines collide with probability 2^-32.
// The keys depend on the position of the line, so that swapped lines are detected.
#include "cpu/gemm/fingerprint_kernel.h"

#include "cpu/simd/prefetch.h"
#include "cpu/simd/words.h"

namespace tf::TF_ISA {
namespace {

constexpr Index kLine = FingerprintArgs::kLineBytes;

constexpr int kParts = kLine / sizeof(Words);

// Digits of pi.
alignas(kLine) constexpr uint32_t kKeys[kLine / sizeof(uint32_t)] = {
    0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0x082efa98, 0xec4e6c89,
    0x452821e6, 0x38d01377, 0xbe5466cf, 0x34e90c6c, 0xc0ac29b7, 0xc97c50dd, 0x3f84d5b5, 0xb5470917};

TF_INLINE uint64_t total(Words sum) {
  uint64_t parts[sizeof(Words) / sizeof(uint64_t)], result = 0;
  std::memcpy(parts, &sum, sizeof(Words));
  for (const uint64_t part : parts) result += part;
  return result;
}

struct Lines {
  const FingerprintArgs& args;
  Words keys[kParts];
  Index lines, step, whole;  // whole: lines of full length

  explicit Lines(const FingerprintArgs& matrix)
      : args(matrix),
        lines(matrix.lines()),
        step(matrix.step() % lines),
        whole(matrix.row_bytes / kLine) {
    for (int i = 0; i < kParts; ++i)
      keys[i] = load_words(reinterpret_cast<const char*>(kKeys) + i * sizeof(Words));
  }

  // The line of `slice` in `row`, and the line of the same slice in the next row.
  Index line_of(Index row, Index slice) const { return (row * step + slice) % lines; }
  Index next_of(Index line) const { return line + step - (line + step >= lines ? lines : 0); }

  TF_INLINE void add_line(Words* sum, Index row, Index line) const {
    const char* at = args.data + row * args.stride + line * kLine;
    char padded[kLine];
    if (__builtin_expect(line >= whole, 0)) {
      std::memset(padded, 0, kLine);
      std::memcpy(padded, at, static_cast<size_t>(args.row_bytes - line * kLine));
      at = padded;
    }
    const Words place =
        fill(static_cast<uint32_t>(row) * 0x9e3779b1u + static_cast<uint32_t>(line) * 0x85ebca77u);
    TF_UNROLL for (int i = 0; i < kParts; ++i) {
      const Words key = add(keys[i], place);
      *sum = add_products(*sum, add(load_words(at + i * static_cast<Index>(sizeof(Words))), key));
    }
  }
};

}  // namespace

uint64_t fingerprint_rows(const FingerprintArgs& args, Index begin, Index end, Index first,
                          Index count) {
  // Prefetch distance in rows, into the second-level cache. Three times as fast as without: the
  // first-level cache supports few outstanding misses.
  constexpr Index kAhead = 128;
  const Lines lines(args);
  Words sum{};
  Index line = lines.line_of(begin, first), ahead = line;
  const auto prefetch = [&](Index row) {
    prefetch_l2(args.data + row * args.stride + ahead * kLine);
    ahead = lines.next_of(ahead);
  };
  for (Index row = begin; row < end && row < begin + kAhead; ++row) prefetch(row);
  for (Index row = begin; row < end; ++row) {
    if (row + kAhead < end) prefetch(row + kAhead);
    for (Index i = 0, l = line; i < count; ++i) {
      lines.add_line(&sum, row, l);
      if (++l == lines.lines) l = 0;
    }
    line = lines.next_of(line);
  }
  return total(sum);
}

void fingerprint_slices(const FingerprintArgs& args, Index begin, Index end, uint64_t* slices) {
  const Lines lines(args);
  for (Index row = begin; row < end; ++row) {
    const Index first = lines.line_of(row, 0);  // in slice 0
    for (Index line = 0; line < lines.lines; ++line) {
      Words sum{};
      lines.add_line(&sum, row, line);
      slices[line - first + (line < first ? lines.lines : 0)] += total(sum);
    }
  }
}

}  // namespace tf::TF_ISA
