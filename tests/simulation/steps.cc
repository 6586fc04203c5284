// What clients do to the store, and what they may see.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/checksum.h"
#include "tests/simulation/due.h"

namespace kvferry::simulation {
namespace {

std::string Name(const ChunkKey& key) {
  return absl::StrCat(absl::Hex(key.ns[0] >> 48), "/", absl::Hex(key.id[0] >> 48), ".", key.id[1], "/", key.group);
}
std::string Name(const absl::Status& status) { return absl::StatusCodeToString(status.code()); }

}  // namespace

void Simulation::Step() {
  using Turn = void (Simulation::*)();
  static constexpr std::pair<int, Turn> kTurns[] = {
      {4, &Simulation::StepOpenSession}, {1, &Simulation::StepEndSession}, {2, &Simulation::StepSuspend},
      {20, &Simulation::StepReserve},    {80, &Simulation::StepCommit},    {1, &Simulation::StepAbort},
      {24, &Simulation::StepPublish},    {30, &Simulation::StepGet},       {3, &Simulation::StepGetOfAnother},
      {16, &Simulation::StepLookup},     {30, &Simulation::StepRelease},   {2, &Simulation::StepShare},
      {2, &Simulation::StepRedeem},      {3, &Simulation::StepPrefetch},   {4, &Simulation::StepErase},
      {3, &Simulation::StepFlush},       {3, &Simulation::StepFaults},     {3, &Simulation::StepViews},
  };
  int total = 0;
  for (const auto& [weight, turn] : kTurns) total += weight;
  int at = static_cast<int>(Random(static_cast<uint64_t>(total)));
  for (const auto& [weight, turn] : kTurns) {
    at -= weight;
    if (at < 0) return (this->*turn)();
  }
}

// ---- sessions ----

Session* Simulation::AnySession() {
  if (sessions_.empty()) return nullptr;
  Session* session = Any(sessions_)->get();
  return session->suspended ? nullptr : session;
}

void Simulation::Forget(Session* session) {
  if (!session->maybe_over) session->Hold(-1);
  for (auto& [key, live] : session->live) {
    if (live.writer != nullptr) late_.push_back(std::move(live.writer));
  }
  session->live.clear();
  session->leases.clear();
}

void Simulation::StepOpenSession() {
  if (sessions_.size() >= most_sessions_) return;
  const size_t tenant = Random(2);
  const absl::StatusOr<SessionId> id = store_->OpenSession(absl::StrCat("tenant ", tenant));
  trace_.Add(absl::StrCat("open session: ", Name(id.status())));
  if (absl::IsResourceExhausted(id.status())) return;
  if (!id.ok()) return Fail("open session: " + id.status().ToString());
  for (size_t spec = 0; spec < specs_.size(); ++spec) {
    const absl::StatusOr<NamespaceId> ns = store_->OpenNamespace(*id, specs_[spec]);
    if (absl::IsResourceExhausted(ns.status())) return store_->EndSession(*id);
    if (!ns.ok() || *ns != namespaces_.at({tenant, spec})) return Fail("open namespace: " + ns.status().ToString());
  }
  auto session = std::make_unique<Session>();
  session->id = *id;
  session->tenant = tenant;
  sessions_.push_back(std::move(session));
}

void Simulation::StepEndSession() {
  if (sessions_.empty()) return;
  const auto it = Any(sessions_);
  const std::unique_ptr<Session> session = std::move(*it);
  sessions_.erase(it);
  trace_.Add(absl::StrCat("end session ", session->id));
  store_->EndSession(session->id);
  Forget(session.get());
  if (OneIn(2)) late_.clear();
}

void Simulation::StepSuspend() {
  if (sessions_.empty()) return;
  const auto it = Any(sessions_);
  Session& session = **it;
  if (!session.suspended) {
    trace_.Add(absl::StrCat("suspend ", session.id));
    store_->SuspendSession(session.id);
    session.suspended = true;
    session.since = executor_.Now();
    return;
  }
  if (store_->ResumeSession(absl::StrCat("tenant ", 1 - session.tenant), session.id).ok()) {
    return Fail("another tenant resumes a session");
  }
  const absl::Status status = store_->ResumeSession(absl::StrCat("tenant ", session.tenant), session.id);
  trace_.Add(absl::StrCat("resume ", session.id, ": ", Name(status)));
  if (!status.ok()) {
    if (!session.maybe_over) return Fail("a session ended before its time: " + status.ToString());
    Forget(&session);
    sessions_.erase(it);
    return;
  }
  if (session.maybe_over) session.Hold(1);
  if (session.maybe_aborted) {
    for (auto& [key, live] : session.live) live.maybe_gone = live.maybe_gone || !live.chunk->sealed;
  }
  session.suspended = session.maybe_over = session.maybe_aborted = false;
}

// ---- writing ----

void Simulation::StepReserve() {
  Session* session = AnySession();
  if (session == nullptr) return;
  const size_t spec = Random(specs_.size());
  ReserveOptions options;
  options.count = 1 + static_cast<int>(Random(3));
  options.group = static_cast<uint16_t>(Random(specs_[spec].groups.size()));
  if (!OneIn(3)) options.deadline = executor_.Now() + absl::Milliseconds(Random(20000));
  auto given_up = std::make_shared<std::atomic<bool>>(false);
  if (OneIn(4)) {
    options.given_up = given_up;
    given_up_.push_back(given_up);
  }
  const std::string what = absl::StrCat("reserve ", options.count, " of ", spec, "/", options.group);
  store_->Reserve(session->id, namespaces_.at({session->tenant, spec}), options,
                  [this, due = Expect(what), id = session->id, spec, given_up,
                   count = options.count](absl::StatusOr<std::vector<std::unique_ptr<ChunkWriter>>> writers) {
                    if (!due->Answer(writers.status()) || closing_) return;
                    if (absl::IsCancelled(writers.status()) && given_up->load()) return;
                    if (writers.ok() && writers->size() != static_cast<size_t>(count)) return Fail("not all or none");
                    Reserved(id, spec, std::move(writers));
                  });
}

void Simulation::Reserved(SessionId id, size_t spec,
                          absl::StatusOr<std::vector<std::unique_ptr<ChunkWriter>>> writers) {
  if (absl::IsResourceExhausted(writers.status())) return;
  Session* session = nullptr;
  for (auto& other : sessions_) session = other->id == id ? other.get() : session;
  if (!writers.ok()) {
    const bool may_be_over = session == nullptr || session->maybe_over;
    if (!absl::IsNotFound(writers.status()) || !may_be_over) Fail("reserve: " + writers.status().ToString());
    return;
  }
  if (session == nullptr) return Fail("a session that has ended is given memory");
  for (auto& writer : *writers) {
    const ChunkKey key = writer->key();
    if (key.Owner() != id || session->live.contains(key)) return Fail("a live key is another's");
    Session::Live& live = session->live[key];
    live.chunk = std::make_shared<Chunk>();
    live.chunk->content = next_content_++;
    live.chunk->holders = session->maybe_over ? 0 : 1;
    live.committed.resize(LayersOf(spec, key.group));
    live.spec = spec;
    live.writer = std::move(writer);
  }
}

void Simulation::StepCommit() {
  Session* session = AnySession();
  if (session == nullptr || session->live.empty()) return;
  auto it = Any(session->live);
  for (size_t tries = session->live.size(); it->second.writer == nullptr && tries > 0; --tries) {
    if (++it == session->live.end()) it = session->live.begin();
  }
  Session::Live& live = it->second;
  if (live.writer == nullptr) return;
  const int layer = static_cast<int>(Random(live.committed.size()));
  if (live.committed[static_cast<size_t>(layer)] && !OneIn(8)) return;
  const bool lies = may_lie_ && OneIn(8) && !live.committed[static_cast<size_t>(layer)];
  uint64_t checksum = 0;
  if (!live.committed[static_cast<size_t>(layer)]) {
    const MutableByteView slot = live.writer->Layer(layer);
    Fill(slot, live.chunk->content, layer);
    checksum = BlockChecksum(ByteView(slot)) ^ (lies ? 1 : 0);
  }
  absl::Status status = absl::InternalError("not answered at once");
  live.writer->Commit(layer, checksum, [&status](absl::Status s) { status = std::move(s); });
  trace_.Add(absl::StrCat("commit ", Name(it->first), " layer ", layer, ": ", Name(status)));
  if (absl::IsNotFound(status) && live.maybe_gone) {
    session->live.erase(it);
    return;
  }
  const bool again = live.committed[static_cast<size_t>(layer)];
  if (again ? !absl::IsFailedPrecondition(status) : !status.ok()) return Fail("commit: " + status.ToString());
  if (again) return;
  live.maybe_gone = false;
  live.chunk->lies = live.chunk->lies || lies;
  live.committed[static_cast<size_t>(layer)] = true;
  for (const bool committed : live.committed) {
    if (!committed) return;
  }
  live.chunk->sealed = true;
  live.writer = nullptr;
}

void Simulation::StepAbort() {
  Session* session = AnySession();
  if (session == nullptr || session->live.empty()) return;
  const auto it = Any(session->live);
  if (it->second.writer == nullptr) return;
  trace_.Add("abort " + Name(it->first));
  --it->second.chunk->holders;
  session->live.erase(it);
}

void Simulation::StepPublish() {
  Session* session = AnySession();
  if (session == nullptr || session->live.empty()) return;
  const auto it = Any(session->live);
  Session::Live& live = it->second;
  Chunk& chunk = *live.chunk;
  PublishOptions options;
  uint64_t id = 1 + Random(names_);
  if (chunk.name.has_value() && OneIn(4)) Erase(*session, *chunk.name);  // it is given anew at once
  if (failed()) return;
  if (OneIn(2) && live.last_name != 0) id = live.last_name;
  options.prefix_key = {0, id};
  if (!OneIn(3)) options.parent = {0, OneIn(2) ? id - 1 : Random(id)};
  options.priority = OneIn(3) ? static_cast<int>(Random(kMaxPriority + 1)) : kDefaultPriority;
  if (OneIn(4)) options.ttl = absl::Milliseconds(1 + Random(100000));
  const ChunkKey key{it->first.ns, options.prefix_key, it->first.group, 0};
  const ChunkPtr there = known_.Find(key);
  const absl::Status status = store_->Publish(session->id, it->first, options);
  trace_.Add(
      absl::StrCat("publish ", Name(it->first), " as ", Name(key), " under ", options.parent[1], ": ", Name(status)));
  if (live.maybe_gone && absl::IsNotFound(status)) return;
  if (!chunk.sealed) {
    if (!absl::IsFailedPrecondition(status)) Fail("what is not sealed is published: " + status.ToString());
    return;
  }
  const bool surely = MustBe(chunk);
  if (chunk.name.has_value() && surely) {
    const bool again = *chunk.name == key;
    if (again ? !status.ok() : !absl::IsFailedPrecondition(status)) Fail("publish again: " + status.ToString());
    return;
  }
  if (status.ok()) {
    if (there == live.chunk) return;
    if (there != nullptr && there->name == key && there->holders > 0 && MustBe(*there)) {
      return Fail("two chunks have the name " + ToString(key));
    }
    if (chunk.name.has_value()) (void)known_.Erase(*chunk.name);  // it was lost, and its name with it
    recent_[session->tenant].push_back(key);
    live.last_name = id;
    const bool expires = options.ttl != absl::InfiniteDuration();
    return known_.Publish(key, live.chunk, expires ? executor_.Now() + options.ttl : absl::InfiniteFuture());
  }
  if (absl::IsAlreadyExists(status) && there != nullptr) return;
  if (!surely && (absl::IsNotFound(status) || absl::IsFailedPrecondition(status))) return;
  Fail("publish: " + status.ToString());
}

// ---- reading ----

// Whether whoever asks for it finds it. What nobody holds may go at any time.
bool Simulation::MustBe(const Chunk& chunk) const {
  return chunk.proven && chunk.sealed && !chunk.lies && !chunk.lost && !flipped_ && chunk.holders > 0;
}

ChunkPtr Simulation::Find(const Session& session, const ChunkKey& key) const {
  if (const auto live = session.live.find(key); live != session.live.end()) return live->second.chunk;
  if (const auto lease = session.leases.find(key); lease != session.leases.end()) return lease->second.chunk;
  return key.IsLive() ? nullptr : known_.Find(key);
}

ChunkKey Simulation::AnyName(size_t tenant) {
  if (const std::vector<ChunkKey>& recent = recent_[tenant]; !recent.empty() && !OneIn(4)) {
    return recent[recent.size() - 1 - Random(std::min<size_t>(recent.size(), 24))];
  }
  const size_t spec = Random(specs_.size());
  const auto group = static_cast<uint16_t>(Random(specs_[spec].groups.size()));
  return ChunkKey{namespaces_.at({tenant, spec}), {0, 1 + Random(names_)}, group, 0};
}

ChunkKey Simulation::AnyKey(Session& session) {
  const uint64_t which = Random(3);
  if (which == 0 && !session.live.empty()) return Any(session.live)->first;
  if (which == 1 && !session.leases.empty()) return Any(session.leases)->first;
  return AnyName(session.tenant);
}

void Simulation::StepGet() {
  Session* session = AnySession();
  if (session == nullptr) return;
  const ChunkKey key = AnyKey(*session);
  const size_t spec = key.ns == namespaces_.at({session->tenant, 0}) ? 0 : 1;
  const int layer = static_cast<int>(Random(LayersOf(spec, key.group)));
  const ChunkPtr chunk = Find(*session, key);
  if (const auto live = session->live.find(key); live != session->live.end() && !chunk->sealed) {
    const bool committed = live->second.committed[static_cast<size_t>(layer)];
    if (live->second.maybe_gone) return;
    absl::StatusOr<BlockView> answer = absl::InternalError("not answered at once");
    store_->Get(session->id, {key, static_cast<uint16_t>(layer)},
                [&answer](absl::StatusOr<BlockView> view) { answer = std::move(view); });
    trace_.Add(absl::StrCat("get ", Name(key), " unsealed: ", Name(answer.status())));
    if (committed ? !answer.ok() : !absl::IsNotFound(answer.status())) {
      return Fail("get of a chunk that is not sealed: " + answer.status().ToString());
    }
    if (committed) Got(chunk, layer, answer, true);
    return;
  }
  Get(session->id, key, layer, chunk);
}

void Simulation::Get(SessionId session, const ChunkKey& key, int layer, const ChunkPtr& chunk) {
  const bool must = chunk != nullptr && !unwell() && MustBe(*chunk);
  const uint64_t times = unwell_times_;
  auto at_once = std::make_shared<bool>(true);
  store_->Get(session, {key, static_cast<uint16_t>(layer)},
              [this, due = Expect(absl::StrCat("get ", Name(key), " layer ", layer)), chunk, layer, must, times,
               at_once](const absl::StatusOr<BlockView>& view) {
                if (!due->Answer(view.status()) || closing_) return;
                if (absl::IsResourceExhausted(view.status()) && !*at_once) return;  // no memory in time
                const bool still = chunk != nullptr && times == unwell_times_ && !unwell() && MustBe(*chunk);
                Got(chunk, layer, view, must && still);
              });
  *at_once = false;
}

void Simulation::Got(const ChunkPtr& chunk, int layer, const absl::StatusOr<BlockView>& view, bool must) {
  if (absl::IsNotFound(view.status())) {
    ++met.gets_missed;
    if (must) return Fail(absl::StrCat("content ", chunk->content, " is lost: ", view.status().message()));
    if (chunk != nullptr && (flipped_ || chunk->lies || !chunk->proven)) chunk->lost = true;
    return;
  }
  if (!view.ok()) return Fail("get: " + view.status().ToString());
  ++met.gets_hit;
  if (chunk == nullptr) return Fail("a chunk is read that nobody has published");
  const std::optional<uint64_t> content = ContentOf(*view, layer);
  if (!content.has_value()) return Fail(absl::StrCat("not the bytes of content ", chunk->content));
  if (!chunk->lies && !view->Verify().ok()) return Fail("the bytes do not have their checksum");
  if (chunk->content == 0) {
    absl::Time last = absl::InfinitePast();  // it may have been published more than once
    for (const Chunk::Candidate& candidate : chunk->candidates) {
      if (candidate.content == *content) last = std::max(last, candidate.expires);
    }
    if (last > absl::InfinitePast()) {
      chunk->content = *content;
      chunk->proven = true;
      chunk->expires = last;
    }
  }
  if (chunk->content != *content) {
    return Fail(absl::StrCat("content ", *content, " is read, expected ", chunk->content));
  }
  if (views_.size() < 6 && OneIn(4)) views_.push_back({*view, *content, layer, chunk->lies});
}

void Simulation::StepViews() {
  for (const View& view : views_) {
    if (ContentOf(view.view, view.layer) != view.content) return Fail("the bytes of a view have changed");
  }
  if (!views_.empty()) views_.erase(Any(views_));
  if (!given_up_.empty() && OneIn(2)) (*Any(given_up_))->store(true);
}

// Whatever is another tenant's or another session's does not exist.
void Simulation::StepGetOfAnother() {
  Session* session = AnySession();
  if (session == nullptr) return;
  ChunkKey key = AnyName(1 - session->tenant);
  const auto other = Any(sessions_);
  if (OneIn(2) && other->get() != session && !(*other)->live.empty()) key = Any((*other)->live)->first;
  absl::Status status = absl::InternalError("not answered at once");
  store_->Get(session->id, {key, 0}, [&status](const absl::StatusOr<BlockView>& view) { status = view.status(); });
  const absl::StatusOr<Match> match = store_->Lookup(session->id, {key}, true);
  if (!absl::IsNotFound(status) || !match.ok() || match->chunks != 0) return Fail("another's chunk is seen");
  if (store_->Share(session->id, {key}, absl::Seconds(1)).ok()) return Fail("another's chunk is shared");
  if (!key.IsLive()) {
    store_->Erase(session->id, key, [&status](absl::Status s) { status = std::move(s); });
    if (!absl::IsNotFound(status)) return Fail("another's chunk is erased");
  }
}

void Simulation::StepLookup() {
  Session* session = AnySession();
  if (session == nullptr) return;
  std::vector<ChunkKey> keys = {AnyKey(*session)};
  for (uint64_t more = Random(4); more > 0 && !keys[0].IsLive(); --more) {
    keys.push_back(keys.back());
    ++keys.back().id[1];
  }
  const bool lease = OneIn(2);
  const absl::StatusOr<Match> match = store_->Lookup(session->id, keys, lease);
  if (!match.ok()) return Fail("lookup: " + match.status().ToString());
  trace_.Add(absl::StrCat("lookup ", Name(keys[0]), " and ", keys.size() - 1, " more", lease ? ", leased: " : ": ",
                          match->chunks));
  for (size_t i = 0; i < keys.size(); ++i) {
    const ChunkKey& key = keys[i];
    const ChunkPtr chunk = key.IsLive() ? Find(*session, key) : known_.Find(key);
    const bool hit = static_cast<int>(i) < match->chunks;
    if (!hit) {
      const bool must = chunk != nullptr && MustBe(*chunk);
      if (must && !lease) Fail("chunk " + ToString(key) + " is held by somebody, and a lookup misses it");
      return;
    }
    if (chunk == nullptr) return Fail("chunk " + ToString(key) + " is found, and nobody has published it");
    if (!chunk->sealed) return Fail("chunk " + ToString(key) + " is found, and it is not sealed");
    if (!lease || key.IsLive()) continue;
    Session::Lease& held = session->leases[key];
    if (held.count++ == 0) held.chunk = chunk;
    ++held.chunk->holders;
  }
}

void Simulation::StepRelease() {
  Session* session = AnySession();
  if (session == nullptr) return;
  if (OneIn(2)) {
    if (session->leases.empty()) return;
    const auto it = Any(session->leases);
    trace_.Add("release " + Name(it->first));
    store_->Release(session->id, {it->first});
    --it->second.chunk->holders;
    if (--it->second.count == 0) session->leases.erase(it);
  } else {
    if (session->live.empty()) return;
    const auto it = Any(session->live);
    trace_.Add("release " + Name(it->first));
    store_->Release(session->id, {it->first});
    --it->second.chunk->holders;
    if (it->second.writer != nullptr && OneIn(2)) late_.push_back(std::move(it->second.writer));
    session->live.erase(it);
  }
}

void Simulation::StepShare() {
  Session* session = AnySession();
  if (session == nullptr) return;
  std::vector<ChunkKey> keys;
  std::vector<ChunkPtr> chunks;
  bool all = true;
  for (uint64_t n = 1 + Random(3); n > 0; --n) {
    keys.push_back(AnyKey(*session));
    chunks.push_back(Find(*session, keys.back()));
    all = all && chunks.back() != nullptr && MustBe(*chunks.back());
  }
  const absl::Duration ttl = absl::Milliseconds(1 + Random(60000));
  const absl::StatusOr<TicketId> id = store_->Share(session->id, keys, ttl);
  trace_.Add(absl::StrCat("share ", Name(keys[0]), " and ", keys.size() - 1, " more: ", Name(id.status())));
  if (!id.ok()) {
    const bool may = absl::IsNotFound(id.status()) || absl::IsFailedPrecondition(id.status());
    if (!absl::IsResourceExhausted(id.status()) && (all || !may)) Fail("share: " + id.status().ToString());
    return;
  }
  for (const ChunkPtr& chunk : chunks) {
    if (chunk == nullptr || !chunk->sealed) return Fail("what is not there or not sealed is shared");
    ++chunk->holders;
  }
  auto ticket = std::make_unique<Ticket>();
  *ticket = {*id, session->tenant, executor_.Now() + ttl, std::move(chunks), false};
  tickets_.push_back(std::move(ticket));
}

void Simulation::StepRedeem() {
  Session* session = AnySession();
  if (session == nullptr || tickets_.empty()) return;
  const Ticket& ticket = **Any(tickets_);
  const absl::StatusOr<std::vector<ChunkKey>> keys = store_->Redeem(session->id, ticket.id);
  trace_.Add(absl::StrCat("redeem: ", Name(keys.status())));
  if (absl::IsNotFound(keys.status()) && (ticket.over || ticket.tenant != session->tenant)) return;
  if (absl::IsResourceExhausted(keys.status())) return;
  if (!keys.ok()) return Fail("redeem: " + keys.status().ToString());
  if (ticket.tenant != session->tenant) return Fail("another tenant's ticket is redeemed");
  if (keys->size() != ticket.chunks.size()) return Fail("redeem: not as many keys as were shared");
  for (size_t i = 0; i < keys->size(); ++i) {
    Session::Lease& held = session->leases[(*keys)[i]];
    if (held.count++ == 0) held.chunk = ticket.chunks[i];
    ++held.chunk->holders;
  }
}

void Simulation::StepPrefetch() {
  Session* session = AnySession();
  if (session == nullptr) return;
  std::vector<ChunkKey> keys;
  for (uint64_t n = 1 + Random(4); n > 0; --n) keys.push_back(AnyKey(*session));
  trace_.Add(absl::StrCat("prefetch ", keys.size()));
  store_->Prefetch(session->id, keys);
}

// ---- what lasts ----

void Simulation::StepErase() {
  Session* session = AnySession();
  if (session == nullptr) return;
  Erase(*session, AnyName(session->tenant));
}

void Simulation::Erase(const Session& session, const ChunkKey& key) {
  const ChunkPtr chunk = known_.Find(key);
  struct State {
    bool at_once = true, missed = false;
    uint64_t last = 0;
  };
  auto state = std::make_shared<State>();
  const bool well = !unwell();
  const uint64_t times = unwell_times_;
  store_->Erase(session.id, key,
                [this, due = Expect("erase " + Name(key)), state, key, well, times](const absl::Status& status) {
                  if (!due->Answer(status) || closing_) return;
                  if (state->at_once) {
                    state->missed = absl::IsNotFound(status);
                    if (!state->missed) Fail("erased, and nothing was written: " + status.ToString());
                  } else if (status.ok()) {
                    ++met.erasures;
                    known_.Forgotten(key, state->last);
                  } else if (well && times == unwell_times_ && !unwell()) {
                    Fail("erase: " + status.ToString());
                  }
                });
  state->at_once = false;
  if (failed()) return;
  if (!state->missed) {
    if (chunk == nullptr) return Fail("chunk " + ToString(key) + " is erased, and nobody has published it");
    state->last = known_.Erase(key);
  } else if (chunk != nullptr && MustBe(*chunk)) {
    Fail("chunk " + ToString(key) + " is held by somebody, and cannot be erased");
  }
}

void Simulation::StepFlush() {
  const StoreStats stats = store_->Stats();
  const Names::Covered covered = known_.BeginFlush(stats.evictions == 0 && stats.disk_reads_failed == 0);
  const bool well = !unwell();
  const uint64_t times = unwell_times_;
  store_->Flush([this, due = Expect("flush"), covered, well, times](const absl::Status& status) {
    if (!due->Answer(status) || closing_) return;
    if (status.ok()) {
      ++met.flushes;
      known_.Flushed(covered);
    } else if (well && times == unwell_times_ && !unwell() && !may_lie_ && !may_fill_ && !may_fail_ &&
               !absl::IsResourceExhausted(status)) {
      Fail("flush: " + status.ToString());
    }
  });
}

void Simulation::StepFaults() {
  const uint64_t which = Random(8);
  if (which < 4) return Advance(OneIn(6) ? absl::Seconds(Random(200)) : absl::Milliseconds(Random(3000)));
  if (which == 4 && may_fail_) {
    disk_.faults.out_of = disk_.faults.out_of > 0 ? 0 : 2 + static_cast<int>(Random(20));
    trace_.Add(absl::StrCat("one operation fails of ", disk_.faults.out_of));
    ++unwell_times_;
  }
  if (which == 5 && may_fill_) {
    disk_.faults.free_bytes = OneIn(2) ? 0 : SimDisk::Faults().free_bytes;
    trace_.Add(absl::StrCat("the volume has ", disk_.faults.free_bytes));
  }
  if (which == 6 && may_crash_ && disk_.faults.crash_after < 0 && OneIn(crash_every_ / 100)) {
    disk_.faults.crash_after = disk_.operations() + static_cast<int>(Random(30));
    trace_.Add(absl::StrCat("a crash at operation ", disk_.faults.crash_after));
    ++unwell_times_;
  }
  if (which == 7 && may_flip_ && OneIn(4)) {
    const std::vector<std::string> names = disk_.Names();
    const std::string& name = names[Random(names.size())];
    if (const uint64_t bits = disk_.SizeOf(name) * 8; bits != 0) disk_.Flip(name, Random(bits));
    trace_.Add("a bit flips in " + name);
    flipped_ = true;
  }
  if (OneIn(4)) CheckAllHeld();
}

}  // namespace kvferry::simulation
