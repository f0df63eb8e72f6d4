// For fakes of a server: what a message asks of attention.
#ifndef FLASHCORE_TESTS_CLIENT_SET_TERMS_H_
#define FLASHCORE_TESTS_CLIENT_SET_TERMS_H_

#include "flashcore/attend.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore {

// The inverse of the client's encoding. `from` has a known mask.kind.
inline void SetTerms(const v1::AttendRequest& from, AttendRequest* to) {
  to->mask.kind = static_cast<Mask::Kind>(from.mask().kind());
  if (from.mask().has_window_left()) to->mask.left = from.mask().window_left();
  if (from.mask().has_window_right()) to->mask.right = from.mask().window_right();
  if (from.has_softmax_scale()) to->softmax_scale = from.softmax_scale();
}

}  // namespace flashcore

#endif  // FLASHCORE_TESTS_CLIENT_SET_TERMS_H_
