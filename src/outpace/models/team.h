// Threads that help with one piece of work after another.
//
// Whoever has the work asks for help and takes shares of it too; helpers take shares as they come free. The work is
// done when all shares that were taken are, so a helper that the system has put aside holds up nobody unless it has a
// share. Whoever waits looks a few microseconds, then sleeps: cores are left to those who can use them.

#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace outpace {

#ifndef LATE
#define LATE()  // where a test lets a thread be late
#endif

constexpr uint64_t NONE = UINT32_MAX;  // in place of the first part that nobody has taken: there is none
constexpr int LOOKS = 400;  // before a thread sleeps: some 20 microseconds

inline void rest() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Wait until `value` is another than `known`.
template <class Number>
void await(const std::atomic<Number>& value, Number known) {
  for (int look = 0; look < LOOKS; look++) {
    if (value.load(std::memory_order_acquire) != known) return;
    rest();
  }
  while (value.load(std::memory_order_acquire) == known) value.wait(known, std::memory_order_acquire);
}

class Team {
 public:
  // The only team of this process, to one thread at a time.
  class Turn {
   public:
    explicit Turn(int threads) : lock_(mutex()) {
      static std::unique_ptr<Team> team;
      if (team && team->process_ != getpid()) (void)team.release();  // a fork: its threads did not come along
      if (!team || team->size_ != threads) {
        team.reset();
        team.reset(new Team(threads));
      }
      team_ = team.get();
    }
    Team* operator->() const { return team_; }
    Team& operator*() const { return *team_; }

   private:
    static std::mutex& mutex() {
      static std::mutex mutex;
      return mutex;
    }
    std::lock_guard<std::mutex> lock_;
    Team* team_;
  };

  // `share(first, last)` for all parts of 0 to `count`, in any order and at once: many at a time at first, so that
  // neighbours stay together, `grain` at a time in the end, so that all are done at once.
  template <class Share>
  void each(int64_t count, int64_t grain, Share&& share) {
    if (size_ == 1 || count <= grain) return count > 0 ? share(0, count) : void();
    const uint64_t work = (next_.load(std::memory_order_relaxed) >> 32) + 1;
    // First nobody can take a share any more: a helper that is late with the work before must not meet half of this.
    next_.store(work << 32 | NONE, std::memory_order_relaxed);
    call_.store([](void* what, int64_t first, int64_t last) { (*static_cast<Share*>(what))(first, last); },
                std::memory_order_release);
    share_.store(const_cast<void*>(static_cast<const void*>(&share)), std::memory_order_release);
    count_.store(count, std::memory_order_release);
    grain_.store(grain, std::memory_order_release);
    done_.store(0, std::memory_order_release);
    LATE();
    next_.store(work << 32, std::memory_order_release);
    work_.store(static_cast<uint32_t>(work), std::memory_order_release);
    work_.notify_all();
    take(static_cast<uint32_t>(work));
    for (int64_t done; (done = done_.load(std::memory_order_acquire)) != count;) await(done_, done);
  }

  int size() const { return size_; }

  ~Team() {
    ended_.store(true, std::memory_order_relaxed);
    work_.fetch_add(1, std::memory_order_release);
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  explicit Team(int size) : size_(size), process_(getpid()) {
    for (int number = 1; number < size; number++) {
      threads_.emplace_back([this] {
        for (uint32_t known = 0;;) {
          await(work_, known);
          if (ended_.load(std::memory_order_relaxed)) return;
          known = work_.load(std::memory_order_acquire);
          take(known);
        }
      });
    }
  }

  // Take shares of this work until there are none left, or it is over. What belongs to a work is good as long as its
  // number stands in `next_`, and that is what a share is taken from: whoever has read what belongs to a later work has
  // seen `next_` change, so the exchange fails.
  void take(uint32_t work) {
    uint64_t next = next_.load(std::memory_order_acquire);
    while (next >> 32 == work) {
      LATE();
      const auto call = call_.load(std::memory_order_acquire);
      void* const share = share_.load(std::memory_order_acquire);
      const int64_t count = count_.load(std::memory_order_acquire), grain = grain_.load(std::memory_order_acquire);
      const int64_t first = static_cast<uint32_t>(next);
      LATE();
      if (first >= count) return;
      const int64_t last = std::min(count, first + std::max(grain, (count - first) / (2 * size_)));
      if (!next_.compare_exchange_weak(next, (next >> 32 << 32) + last, std::memory_order_acq_rel)) continue;
      call(share, first, last);
      if (done_.fetch_add(last - first, std::memory_order_acq_rel) + last - first == count) done_.notify_one();
      next = next_.load(std::memory_order_acquire);
    }
  }

  const int size_;
  const pid_t process_;
  std::vector<std::thread> threads_;
  std::atomic<void (*)(void*, int64_t, int64_t)> call_{nullptr};
  std::atomic<void*> share_{nullptr};
  std::atomic<int64_t> count_{0}, grain_{0};
  std::atomic<bool> ended_{false};
  alignas(64) std::atomic<uint32_t> work_{0};
  alignas(64) std::atomic<uint64_t> next_{0};  // the work's number, and its first part that nobody has taken
  alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace outpace
