// The expected state of resident sequences: plain rows, and tokens for the pages that they share.
#ifndef FLASHCORE_TESTS_ENGINE_SEQUENCE_MODEL_H_
#define FLASHCORE_TESTS_ENGINE_SEQUENCE_MODEL_H_

#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kv_8bit.h"
#include "server/kv/sequence.h"
#include "server/request/spans.h"

namespace flashcore::server::testing {

// Pages that are alive, and their bytes.
struct PageCount {
  std::atomic<size_t> pages{0};
  std::atomic<size_t> bytes{0};
};

// A page, alive as long as a layer holds it.
class PageToken {
 public:
  PageToken(PageCount* count, size_t bytes) : count_(count), bytes_(bytes) {
    ++count_->pages;
    count_->bytes += bytes_;
  }
  ~PageToken() {
    --count_->pages;
    count_->bytes -= bytes_;
  }
  PageToken(const PageToken&) = delete;
  PageToken& operator=(const PageToken&) = delete;

 private:
  PageCount* const count_;
  const size_t bytes_;
};

// One layer. A copy of it is a fork.
class ModelLayer {
 public:
  ModelLayer(const SequenceShape& shape, PageCount* count)
      : layout_(shape.page_layout()), count_(count) {}

  uint64_t length() const { return length_; }
  size_t kv_bytes() const { return pages_.size() * layout_.page_bytes(); }

  void Append(const SpanTensors& from, uint32_t rows) {
    // The written page belongs to this layer alone afterwards, copied or not: it gets a new token.
    // The old token stays alive if other layers hold it.
    if (length_ % kernels::kPageTokens != 0) pages_.pop_back();
    Resize(length_ + rows);
    for (uint32_t row = 0; row < rows; ++row) {
      for (int32_t head = 0; head < layout_.num_kv_heads; ++head) {
        const int64_t at = row * from.kv_strides.row + head * from.kv_strides.head;
        Write(from.key + at, length_ + row, head, &key_);
        Write(from.value + at, length_ + row, head, &value_);
      }
    }
    length_ += rows;
    while (pages_.size() < PagesFor(length_)) {
      pages_.push_back(std::make_shared<PageToken>(count_, layout_.page_bytes()));
    }
  }

  void Truncate(uint64_t length) {
    length_ = length;
    Resize(length);
    pages_.resize(PagesFor(length));
  }

  // Pages of K, and of V, in the order of their rows.
  kernels::KvView view() const {
    kernels::KvView kv;
    kv.key = key_.data();
    kv.value = value_.data();
    kv.pages = places_.data();
    kv.row_stride = layout_.row_bytes();
    kv.head_stride = layout_.head_bytes();
    kv.page_stride = layout_.value_offset();
    kv.rows = static_cast<int32_t>(length_);
    return kv;
  }

 private:
  static size_t PagesFor(uint64_t rows) {
    return (rows + kernels::kPageTokens - 1) / kernels::kPageTokens;
  }
  void Resize(uint64_t length) {
    const size_t pages = PagesFor(length);
    key_.resize(pages * layout_.value_offset());
    value_.resize(key_.size());
    while (places_.size() < pages) places_.push_back(static_cast<int32_t>(places_.size()));
  }
  // A row of one head, as pages have it.
  void Write(const std::byte* from, uint64_t row, int32_t head, std::vector<std::byte>* to) const {
    std::byte* const page = to->data() + row / kernels::kPageTokens * layout_.value_offset();
    const auto in_page = static_cast<int32_t>(row % kernels::kPageTokens);
    if (kernels::Is8Bit(layout_.kv_dtype)) {
      kernels::Store8BitRow(layout_, from, head, in_page, page);
      return;
    }
    std::memcpy(page + head * layout_.head_bytes() + in_page * layout_.row_bytes(), from,
                layout_.row_bytes());
  }

  kernels::PageLayout layout_;
  PageCount* count_;
  uint64_t length_ = 0;
  std::vector<std::byte> key_, value_;  // pages
  std::vector<int32_t> places_;         // 0, 1, ..
  std::vector<std::shared_ptr<PageToken>> pages_;
};

// A sequence. The holder of a layer's lock knows its contents, and no other thread changes them,
// except that a sequence may be deleted at any time. Locks are taken in the order of the sequences'
// addresses, then of the layers.
struct ModelSequence {
  // Forks have the family of their parent.
  ModelSequence(const SequenceInfo& info, std::string client_name, uint64_t family_number,
                PageCount* count)
      : id(info.id),
        shape(info.shape),
        pin(info.settings.pin),
        client(std::move(client_name)),
        family(family_number),
        layers(info.shape.num_layers, ModelLayer(info.shape, count)),
        locks(info.shape.num_layers) {}

  size_t kv_bytes() const {
    size_t bytes = 0;
    for (const ModelLayer& layer : layers) bytes += layer.kv_bytes();
    return bytes;
  }
  std::vector<uint64_t> lengths() const {
    std::vector<uint64_t> lengths;
    for (const ModelLayer& layer : layers) lengths.push_back(layer.length());
    return lengths;
  }

  const SequenceId id;
  const SequenceShape shape;
  // At `now` or later.
  void MarkUsed(TimePoint now) {
    TimePoint last = last_used;
    while (last < now && !last_used.compare_exchange_weak(last, now)) continue;
  }

  const bool pin;
  const std::string client;
  const uint64_t family;
  std::atomic<bool> doomed{false};                // is being deleted, or has been
  std::atomic<bool> gone{false};                  // has been deleted, evicted, or has expired
  std::atomic<TimePoint> last_used{TimePoint()};  // the last use may be later, but not earlier
  std::vector<ModelLayer> layers;
  std::deque<std::shared_mutex> locks;  // [num_layers]
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_ENGINE_SEQUENCE_MODEL_H_
