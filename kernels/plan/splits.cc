#include "kernels/plan/splits.h"

#include <algorithm>

#include "kernels/plan/tiles.h"

namespace flashcore::kernels {

int32_t SplitRows(const Geometry& geometry, const Span& span, const PlanOptions& options,
                  int32_t workers) {
  constexpr int64_t kMaxWaves = 4;  // more gain nothing: the last wave is short already
  const int32_t rows = span.query_rows * geometry.group();
  if (rows > options.split_max_rows) return kUnsplit;
  if (options.items_per_worker == 0) return options.split_kv_rows;
  const int32_t usual = UsualSplitRows(options, rows);
  const int32_t shortest = !IsSmall(rows) && MayHaveRuns(options, rows) ? usual / 2 : usual;
  if (span.kv.rows <= shortest) return kUnsplit;

  int64_t all = 0;      // K/V rows that the tiles of a KV head read
  int32_t longest = 0;  // by one tile
  for (int32_t row = 0; row < rows; row += options.tile_rows) {
    const KvRange kv =
        KvOfTile(span, geometry.group(), row, std::min(options.tile_rows, rows - row));
    all += kv.end - kv.begin;
    longest = std::max(longest, kv.end - kv.begin);
  }
  if (longest <= std::max(shortest, 0)) return kUnsplit;
  // As many tiles of the longest have as much work.
  const int64_t tiles = (all + longest - 1) / longest * geometry.num_kv_heads;
  const int64_t places = Places(options, workers);
  const auto& kinds = options.costs->tiles;
  const int largest = BlockKind(options, options.tile_rows, rows);
  // Time of the span alone in splits of so many K/V rows, in the tiles that are done first. Smaller
  // tiles read K/V more often.
  const auto time_of = [&](int64_t splits, double kv_rows) {
    const auto of_kind = [&](const TileKind& kind) {
      const int64_t blocks = tiles * splits * (kinds[largest].rows / kind.rows);
      return TimeOfBlocks(static_cast<double>(blocks), kind, BlockTime(kind) * kv_rows, options,
                          workers);
    };
    double time = of_kind(kinds[largest]);
    if (!MayHalve(span, options, splits > 1)) return time;
    for (int kind = largest - 1; kind > 0; --kind) time = std::min(time, of_kind(kinds[kind]));
    return time;
  };
  const int32_t unit = IsSmall(rows) ? options.split_kv_rows : options.costs->split_unit;
  const int32_t cost = CostOfResults(options, usual);
  int32_t best = kUnsplit;
  double least_time = time_of(1, longest);
  // Takes splits of at least `least` rows that take less than `time`.
  const auto take_faster = [&](int32_t least, double time) {
    const int32_t most_splits = DivideUp(longest, least);
    int32_t in_waves = 1;
    for (int64_t waves = 1; waves <= kMaxWaves && in_waves < most_splits; ++waves) {
      in_waves = static_cast<int32_t>(std::min<int64_t>(most_splits, waves * places / tiles));
      if (in_waves <= 1) continue;
      const int32_t units = DivideUp(DivideUp(longest, in_waves), unit);
      const int32_t split_rows = std::max(least, units * unit);
      const double of_splits = time_of(DivideUp(longest, split_rows), split_rows + cost);
      if (of_splits >= time) continue;
      least_time = time = of_splits;
      best = split_rows;
    }
  };
  take_faster(usual, least_time);
  if (shortest < usual) take_faster(shortest, least_time / options.costs->half_split_gain);
  return best;
}

}  // namespace flashcore::kernels
