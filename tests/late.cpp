// Many small works for a team whose threads are late at the worst places: each part must be done once, by its own work.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

thread_local unsigned chance = 1;
#define LATE() (rand_r(&chance) % 4 ? void() : void(usleep(rand_r(&chance) % 200)))
#include "team.h"

int main() {
  unsigned drawn = 7;
  for (int work = 0; work < 2000; work++) {
    const int64_t count = 1 + rand_r(&drawn) % 40, grain = 1 + rand_r(&drawn) % 4;
    std::vector<std::atomic<int>> done(count);
    outpace::Team::Turn team(4);
    team->each(count, grain, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; part++) done[part]++;
    });
    for (const std::atomic<int>& times : done)
      if (times != 1) return std::printf("work %d: a part was done %d times\n", work, times.load()), 1;
  }
}
