// A thread pool that runs one parallel loop after another.
//
// The calling thread takes shares of the loop too; helpers take shares whenever they are free. A loop is done when all
// of its shares are, so a helper that the system has descheduled delays nobody unless it holds a share. Waiting threads
// spin for some microseconds, then sleep.

#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
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
#define LATE()  // tests delay a thread here
#endif

constexpr uint64_t NONE = UINT32_MAX;  // instead of the first part that nobody has taken: all are taken
constexpr int LOOKS = 400;  // spins before a thread sleeps: some 20 microseconds

inline void rest() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Wait until `value` differs from `known`.
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
  // The only team of this process, for one thread at a time.
  class Turn {
   public:
    explicit Turn(int threads) : lock_(mutex()) {
      // The caller may flush denormal numbers, and helpers keep the settings of the thread that has made them.
      std::fegetenv(&settings_);
      std::fesetenv(FE_DFL_ENV);
      std::unique_ptr<Team>& team = Turn::team();
      if (!team || team->size_ != threads) {
        team.reset();
        team.reset(new Team(threads));
      }
      team_ = team.get();
    }
    ~Turn() { std::fesetenv(&settings_); }
    Team* operator->() const { return team_; }
    Team& operator*() const { return *team_; }

   private:
    static std::unique_ptr<Team>& team() {
      static std::unique_ptr<Team> team;
      return team;
    }
    // After a fork there is a new one: a thread that is gone may have locked the old one. So are the team's threads.
    static std::mutex& mutex() {
      static std::atomic<std::mutex*> mutex{new std::mutex};
      [[maybe_unused]] static const int once = pthread_atfork(nullptr, nullptr, [] {
        mutex = new std::mutex;
        (void)team().release();
      });
      return *mutex;
    }
    std::lock_guard<std::mutex> lock_;
    std::fenv_t settings_;
    Team* team_;
  };

  // Call `share(first, last)` in parallel, in any order, until 0 to `count` are covered. Shares are large at first, to
  // keep neighbours together, and shrink to `grain`, so that all threads finish at the same time.
  template <class Share>
  void each(int64_t count, int64_t grain, Share&& share) {
    if (size_ == 1 || count <= grain) return count > 0 ? share(0, count) : void();
    const uint64_t work = (next_.load(std::memory_order_relaxed) >> 32) + 1;
    // First make sure that nobody can take a share: a helper that is late must not see half of the new work.
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
  explicit Team(int size) : size_(size) {
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

  // Take shares of this work until none is left. The work's fields are valid while its number is in `next_`, from which
  // shares are taken by compare-and-exchange: for a thread that has read fields of later work, it fails.
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
  std::vector<std::thread> threads_;
  std::atomic<void (*)(void*, int64_t, int64_t)> call_{nullptr};
  std::atomic<void*> share_{nullptr};
  std::atomic<int64_t> count_{0}, grain_{0};
  std::atomic<bool> ended_{false};
  alignas(64) std::atomic<uint32_t> work_{0};
  alignas(64) std::atomic<uint64_t> next_{0};  // the number of the work, and the first part that nobody has taken
  alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace outpace
