#include "server/transport/local/connection.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/wire/frames.h"
#include "proto/wire/ring.h"
#include "server/base/error_info.h"
#include "server/telemetry/log.h"
#include "server/transport/rpc/convert.h"
#include "server/transport/rpc/unknown_fields.h"

namespace flashcore::server::local {
namespace {

constexpr size_t kMaxHelloBytes = 1024;  // of the first frame
constexpr size_t kMaxClientBytes = 128;  // of LocalHello.client

// That one connection may hand in before those of other clients may. A call ends its turn.
constexpr int kFramesAtOnce = 16;

// While more is unsent, nothing is read: answers of a client that does not read cannot pile up.
constexpr size_t kMaxUnsentBytes = size_t{64} << 10;

// `region`, unmapped on the thread for slow work: the last request that uses it may end on a
// lane's.
Regions::Region UnmapElsewhere(FairJobs* slow, const std::string& client, Regions::Region region) {
  const SharedRegion* const mapped = region.get();
  return {mapped, [slow, client, region = std::move(region)](const SharedRegion*) mutable {
            slow->Add(client, [last = std::move(region)] {});
          }};
}

void LogBroken(const std::string& client, const absl::Status& why) {
  static LogLimiter limiter(10);
  if (const auto pass = limiter.Admit()) {
    LogWarning("local connection ended",
               {{"identity", client}, {"error", why.message()}, {"suppressed", pass.suppressed}});
  }
}

}  // namespace

Connection::Connection(const Services* services, const Options& options, FileDescriptor socket,
                       std::string client, TimePoint now)
    : services_(*services),
      context_(services->calls.methods->context()),
      options_(options),
      began_(now),
      last_use_(now),
      socket_(std::move(socket), std::move(client), services->passed_files, &context_->unsent,
              [this](CutOff why, bool /*again*/) {
                mailbox()([why](Connection* self) { self->EndUnread(why); });
              }) {}

Connection::~Connection() { End(); }

uint32_t Connection::events() const {
  uint32_t events = EPOLLRDHUP;
  if (!Paused()) events |= EPOLLIN;
  if (socket_.unsent_bytes() > 0) events |= EPOLLOUT;
  return events;
}

bool Connection::Paused() const {
  if (alone_ != 0 || waits_for_room_ || socket_.unsent_bytes() > kMaxUnsentBytes) return true;
  return calls_.size() >= static_cast<size_t>(options_.max_calls);
}

Door::State Connection::StateAt(TimePoint now) const {
  if (!greeted_) return Door::State::kSilent;
  const bool in_use = !calls_.empty() || !rings_.empty() || lease_.open() || !regions_->empty() ||
                      alone_ != 0 || socket_.unsent_bytes() > 0;
  return Door::StateOf(in_use, last_use_, now);
}

void Connection::OnEvents(uint32_t events) {
  if ((events & EPOLLOUT) != 0 && !socket_.Flush()) return End();
  if (has_more()) return Advance();  // before it reads more
  if ((events & EPOLLIN) != 0 && !Paused()) {
    const absl::Status read = socket_.Read();
    read_at_ = context_->clock->Now();
    if (absl::IsUnavailable(read)) return End();
    if (!read.ok()) return Break(read);
    Advance();
  } else if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
    End();
  }
}

void Connection::Advance() {
  has_more_ = true;
  called_ = false;
  for (int taken = 0; taken < kFramesAtOnce && !called_ && MayTakeOneMore(); ++taken) {
    const auto frame = socket_.Next(greeted_ ? wire::kMaxFrameBytes : kMaxHelloBytes);
    if (!frame.ok()) return Break(frame.status());
    if (!frame->has_value()) {
      has_more_ = false;
      break;
    }
    Handle(**frame);
  }
  if (!ended_ && socket_.HasStrayFiles()) {
    Break(absl::InvalidArgumentError("frame: a file descriptor without a request for it"));
  }
}

bool Connection::MayTakeOneMore() {
  if (ended_ || Paused()) return false;
  CallRoom& room = *services_.calls.room;
  if (!greeted_ || room.HasRoom(identity_.name)) return true;
  waits_for_room_ = true;
  room.WaitForRoom(identity_.name, [post = mailbox()] {
    post([](Connection* self) { self->waits_for_room_ = false; });
  });
  return false;
}

void Connection::Handle(absl::string_view frame) {
  v1::LocalRequest request;
  if (!request.ParseFromArray(frame.data(), static_cast<int>(frame.size()))) {
    return Break(absl::InvalidArgumentError("frame: not a well-formed LocalRequest"));
  }
  if (request.id() == 0) return Break(absl::InvalidArgumentError("id: 0"));
  if (greeted_ != !request.has_hello()) {
    return Break(absl::InvalidArgumentError("hello: it comes first, and once"));
  }
  const bool closes = std::any_of(rings_.begin(), rings_.end(), [&](const auto& ring) {
    return ring.second.closing == request.id();
  });
  if (!request.has_cancel() && (closes || calls_.count(request.id()) > 0)) {
    return Break(absl::InvalidArgumentError(
        absl::StrCat("id: ", request.id(), " is that of a request that is not answered yet")));
  }
  // The version of a Hello is not known yet: its own fields may be those of a later one.
  if (absl::Status status = CheckKnownFields(request); !status.ok() && !request.has_hello()) {
    return request.has_cancel() ? Break(status) : Reply(request.id(), status);
  }
  Dispatch(request);
}

void Connection::Dispatch(const v1::LocalRequest& request) {
  const uint64_t id = request.id();
  switch (request.action_case()) {
    case v1::LocalRequest::kHello:
      return Hello(id, request.hello());
    case v1::LocalRequest::kRegisterMemory:
      return RegisterMemory(id, request.register_memory());
    case v1::LocalRequest::kAllocateDeviceMemory:
      return AllocateDeviceMemory(id, request.allocate_device_memory());
    case v1::LocalRequest::kUnregisterMemory:
      return UnregisterMemory(id, request.unregister_memory());
    case v1::LocalRequest::kOpenRing:
      return OpenRing(id, request.open_ring());
    case v1::LocalRequest::kCloseRing:
      return CloseRing(id, request.close_ring());
    case v1::LocalRequest::kCall:
      return Call(id, request.call());
    case v1::LocalRequest::kCancel:
      return Cancel(id, request.cancel());
    default:
      return Break(absl::InvalidArgumentError("action: not set"));
  }
}

void Connection::Hello(uint64_t id, const v1::LocalHello& hello) {
  absl::StatusOr<Identity> identity = context_->authenticator.IdentifyLocal(socket_.fd());
  absl::Status status = identity.status();
  if (status.ok() && hello.client().size() > kMaxClientBytes) {
    status = absl::InvalidArgumentError(
        absl::StrCat("client: ", hello.client().size(), " bytes; at most ", kMaxClientBytes));
  }
  if (status.ok() &&
      (hello.min_version() > wire::kLocalVersion || hello.max_version() < wire::kLocalVersion)) {
    status = absl::FailedPreconditionError(
        absl::StrCat("version: the client speaks ", hello.min_version(), " to ",
                     hello.max_version(), ", and the server ", wire::kLocalVersion));
  }
  if (!status.ok()) {
    Reply(id, status);
    return End();
  }
  identity_ = *std::move(identity);
  greeted_ = true;
  LogDebug("local connection", {{"identity", identity_.name}, {"client", hello.client()}});
  v1::LocalReply reply;
  reply.mutable_hello()->set_version(wire::kLocalVersion);
  reply.mutable_hello()->set_identity(identity_.name);
  reply.mutable_hello()->set_max_frame_bytes(wire::kMaxFrameBytes);
  Send(id, absl::OkStatus(), std::move(reply));
}

void Connection::RegisterMemory(uint64_t id, const v1::LocalRegisterMemory& request) {
  absl::StatusOr<FileDescriptor> file = socket_.TakeFile();
  if (!file.ok()) return Reply(id, file.status());
  alone_ = id;
  services_.slow->Add(identity_.name, [services = &services_, post = mailbox(), id,
                                       file = *std::move(file), request]() mutable {
    auto give_back = [post] {
      post([](Connection* self) { self->EndForMemory("shared memory", "--shared_memory_bytes"); });
    };
    auto region = services->calls.methods->memory()->Map(file, request.bytes(), request.read_only(),
                                                         post.client, std::move(give_back));
    services->passed_files->Close(post.client, std::move(file));
    if (region.ok()) region = UnmapElsewhere(services->slow, post.client, *std::move(region));
    post([id, region = std::move(region)](Connection* self) mutable {
      self->Registered(id, std::move(region));
    });
  });
}

void Connection::Registered(uint64_t id, absl::StatusOr<Regions::Region> region) {
  alone_ = 0;
  if (!region.ok()) return Reply(id, region.status());
  v1::LocalReply reply;
  reply.mutable_register_memory()->set_region_id(regions_->Add(*std::move(region)));
  Send(id, absl::OkStatus(), std::move(reply));
}

void Connection::AllocateDeviceMemory(uint64_t id, const v1::LocalAllocateDeviceMemory& request) {
  alone_ = id;
  services_.slow->Add(identity_.name, [services = &services_, post = mailbox(), id, request] {
    auto give_back = [post] {
      post([](Connection* self) { self->EndForMemory("device memory", "--device_tensor_bytes"); });
    };
    auto memory = services->calls.methods->device_memory()->Allocate(
        request.bytes(), request.device_id(), post.client, std::move(give_back));
    if (memory.ok()) {
      memory->region = UnmapElsewhere(services->slow, post.client, std::move(memory->region));
    }
    post([id, memory = std::move(memory)](Connection* self) mutable {
      self->Allocated(id, std::move(memory));
    });
  });
}

void Connection::Allocated(uint64_t id, absl::StatusOr<DeviceMemory::Allocation> memory) {
  alone_ = 0;
  if (!memory.ok()) return Reply(id, memory.status());
  v1::LocalReply reply;
  v1::LocalAllocateDeviceMemoryResult& result = *reply.mutable_allocate_device_memory();
  result.set_bytes(memory->region->bytes());
  result.set_device_uuid(memory->uuid);
  result.set_region_id(regions_->Add(std::move(memory->region)));
  Send(id, absl::OkStatus(), std::move(reply),
       std::make_shared<const FileDescriptor>(std::move(memory->file)));
}

void Connection::UnregisterMemory(uint64_t id, const v1::LocalUnregisterMemory& request) {
  const bool removed = regions_->Remove(request.region_id()) != nullptr;
  Reply(id, removed ? absl::OkStatus()
                    : WithInfo(absl::NotFoundError("region_id: this connection has no such region"),
                               reason::kRegionLost));
}

void Connection::OpenRing(uint64_t id, const v1::LocalOpenRing& request) {
  const absl::StatusOr<uint32_t> number = AddRing(request);
  if (!number.ok()) return Reply(id, number.status());
  v1::LocalReply reply;
  reply.mutable_open_ring()->set_ring(*number);
  Send(id, absl::OkStatus(), std::move(reply), doorbell_);
}

absl::StatusOr<uint32_t> Connection::AddRing(const v1::LocalOpenRing& request) {
  if (rings_.size() >= kMaxRings) {
    return WithInfo(absl::ResourceExhaustedError(absl::StrCat("the connection has ", kMaxRings,
                                                              " rings, which is the limit")),
                    reason::kQuotaExceeded,
                    {{"limit", "max_connection_rings"},
                     {"needed", 1},
                     {"used", rings_.size()},
                     {"allowed", kMaxRings}});
  }
  absl::StatusOr<Regions::Region> region = regions_->Find(request.region_id());
  if (!region.ok()) return region.status();
  auto ring =
      Ring::Open(*std::move(region), {request.offset(), request.slots(), request.slot_bytes()});
  if (!ring.ok()) return ring.status();
  if (doorbell_ == nullptr) {
    FileDescriptor doorbell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!doorbell.valid() || !services_.poller->AddDoorbell(doorbell.get())) {
      return WithInfo(absl::ResourceExhaustedError("doorbell: the server can open no more files"),
                      reason::kServerFull);
    }
    doorbell_ = std::make_shared<const FileDescriptor>(std::move(doorbell));
  }
  const uint32_t number = ++last_ring_;
  RingSession::Callbacks callbacks;
  callbacks.broken = [post = mailbox()](const absl::Status& why) {
    post([why](Connection* self) { self->Break(why); });
  };
  callbacks.gone = [post = mailbox(), number] {
    post([number](Connection* self) { self->RingGone(number); });
  };
  auto session = std::make_shared<RingSession>(services_.attend, services_.calls.uses, identity_,
                                               regions_, *std::move(ring), std::move(callbacks));
  services_.poller->Add(session);
  rings_[number].session = std::move(session);
  return number;
}

void Connection::CloseRing(uint64_t id, const v1::LocalCloseRing& request) {
  const auto ring = rings_.find(request.ring());
  if (ring == rings_.end() || ring->second.session == nullptr) {
    return Reply(id, absl::NotFoundError(absl::StrCat("ring: ", request.ring(), " is not open")));
  }
  ring->second.closing = id;
  const std::shared_ptr<RingSession> session = std::move(ring->second.session);
  session->End();
  services_.poller->Remove(session);
}

void Connection::RingGone(uint32_t number) {
  const auto ring = rings_.find(number);
  if (ring == rings_.end()) return;
  const uint64_t id = ring->second.closing;
  rings_.erase(ring);
  Reply(id, absl::OkStatus());
}

void Connection::Call(uint64_t id, const v1::LocalCall& call) {
  called_ = true;
  using Kind = AttentionMethods::Kind;
  const MethodTable::Method* const method = services_.methods->Find(call.method());
  if (method != nullptr && method->kind == Kind::kLease) {  // here: it is the connection's
    v1::LocalReply reply;
    const absl::Status status =
        services_.methods->HoldLease(identity_, call.message(), &lease_, reply.mutable_message());
    return Send(id, status, std::move(reply));
  }
  const TimePoint deadline = DeadlineAfter(read_at_, call.timeout_ns());
  if (method != nullptr && method->kind == Kind::kQuick) {
    v1::LocalReply reply;
    const absl::Status status = method->run(CheckDeadline(*context_, deadline), identity_,
                                            call.message(), reply.mutable_message());
    return Send(id, status, std::move(reply));
  }
  const bool has_tensors = method == nullptr || method->kind == Kind::kTensors;
  if (has_tensors) {
    if (absl::Status status = Admit(*context_, identity_); !status.ok()) return Reply(id, status);
  }
  if (method == nullptr) {
    return Reply(id, absl::UnimplementedError(absl::StrCat(
                         "method: the local socket has no '", call.method().substr(0, 64),
                         "'; rings take the place of AttendStream")));
  }
  PendingCall::Reply answer = [post = mailbox(), id](std::shared_ptr<PendingCall> pending,
                                                     absl::StatusOr<std::string> message) {
    post([id, pending = std::move(pending), message = std::move(message)](
             Connection* self) mutable { self->Answer(id, std::move(message)); });
  };
  const std::shared_ptr<PendingCall> pending = method->make(
      {&services_.calls, identity_, regions_, deadline}, call.message(), std::move(answer));
  calls_[id] = pending;  // before it can reply
  if (has_tensors) return pending->Start();
  alone_ = id;  // for later calls would overtake it on the other thread
  services_.calls.long_calls->Add(identity_.name, [pending] { pending->Start(); });
}

void Connection::Answer(uint64_t id, absl::StatusOr<std::string> message) {
  v1::LocalReply result;
  const absl::Status status = message.status();
  if (status.ok()) result.set_message(*std::move(message));
  Send(id, status, std::move(result));
  calls_.erase(id);
  if (alone_ == id) alone_ = 0;
}

void Connection::Cancel(uint64_t id, const v1::LocalCancel& cancel) {
  if (!cancel.in_ring()) {
    if (const auto call = calls_.find(id); call != calls_.end()) {
      const std::shared_ptr<PendingCall> keep = call->second;
      keep->Cancel();
    }
    return;
  }
  const auto ring = rings_.find(cancel.ring());
  if (ring != rings_.end() && ring->second.session != nullptr) {
    ring->second.session->Cancel(cancel.tag());
  }
}

void Connection::CheckTime(TimePoint now) {
  if (!greeted_ && now - began_ >= options_.hello_within) {
    context_->metrics->CountRefusedLocalConnection(RefusedLocalConnection::kSilent);
    return End();
  }
}

void Connection::EndUnread(CutOff why) {
  if (ended_) return;
  if (why != CutOff::kDrain) {
    context_->metrics->CountRefusedLocalConnection(RefusedLocalConnection::kUnread);
    LogBroken(identity_.name,
              absl::CancelledError(
                  why == CutOff::kTimeout
                      ? "the client did not read a reply within --reply_timeout_s"
                      : "the client left too many replies unread (--unsent_reply_bytes)"));
  }
  End();
}

void Connection::EndForMemory(absl::string_view memory, absl::string_view flag) {
  Break(absl::UnavailableError(absl::StrCat(memory,
                                            ": all clients share too much together, and this one "
                                            "the most (",
                                            flag, "); connect again")),
        RefusedLocalConnection::kSharedMemory);
}

void Connection::Send(uint64_t id, const absl::Status& status, v1::LocalReply reply,
                      FrameSocket::SentFile file) {
  if (ended_) return;
  last_use_ = context_->clock->Now();
  reply.set_id(id);
  if (!status.ok()) {
    reply.clear_result();
    *reply.mutable_status() = ToStatus(status);
  }
  // The client is gone or does not read; drop its remaining requests.
  if (!socket_.Send(reply.SerializeAsString(), std::move(file), identity_.name)) End();
}

void Connection::Break(const absl::Status& why, RefusedLocalConnection reason) {
  if (ended_) return;
  context_->metrics->CountRefusedLocalConnection(reason);
  LogBroken(identity_.name, why);
  Reply(0, why);
  End();
}

void Connection::End() {
  if (std::exchange(ended_, true)) return;
  for (auto& [number, ring] : rings_) {
    if (ring.session == nullptr) continue;
    ring.session->End();
    services_.poller->Remove(ring.session);
  }
  rings_.clear();
  for (auto& [id, call] : std::exchange(calls_, {})) call->Cancel();
  if (doorbell_ != nullptr) services_.poller->RemoveDoorbell(doorbell_->get());
  regions_->Clear();
  lease_.End();
}

}  // namespace flashcore::server::local
