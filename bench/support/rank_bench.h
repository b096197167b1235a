// bench/support/rank_bench.h — times a call that several processes make together.
//
// A program of this kind starts itself once per rank. The ranks meet in a page of shared memory
// that has nothing to do with the engines under test: it holds the barrier before every repetition,
// the times, and the flags of the ping that tells near cores from far ones.

#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tessera::bench {

struct Control;  // the page

/// Times of one row in microseconds per call, the slowest rank's of each repetition, by the state
/// the cores were in. Filled on rank 0 only.
struct Samples {
  std::vector<double> near;
  std::vector<double> far;
  double copy_gbps = 0.0;  // of all ranks together, measured just before
  double others = 0.0;     // share of the cores that other programs took meanwhile
};

class RankBench {
 public:
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  /// A listening socket on loopback that rank 0 owns; -1 elsewhere.
  int listener() const noexcept { return listener_; }
  /// The port it listens on; the same on every rank.
  int port() const noexcept { return port_; }

  /// Waits until all ranks are here.
  void meet();

  /// Times `call`. Every repetition begins with a barrier and makes `batch` calls; there are at
  /// least ten, more if they fit into `seconds`. If other programs disturb, tries again a few times
  /// and returns the quietest attempt; a quick look, of less than half a second, is taken as it is.
  Samples measure(const std::function<void()>& call, int batch, double seconds);

 private:
  friend int run_ranks(int argc, char** argv, const std::vector<int>& sizes,
                       const std::function<void(RankBench&)>& body);
  RankBench(int rank, int size, int listener, int port, Control* control);
  Samples measure_once(const std::function<void()>& call, int batch, double seconds);
  /// Tells all ranks what rank 0 says.
  double agree_on(double value);
  /// Copies memory on as many ranks as there are cores, at the same time.
  double measure_copy();
  /// Lets ranks 0 and 1 find out how far apart their cores are.
  bool cores_are_far();

  int rank_;
  int size_;
  int listener_;
  int port_;
  Control* control_;
  int generation_ = 0;
  bool was_far_ = false;
};

/// The whole of main(): for every number of ranks in `sizes` (or the one that --ranks names),
/// starts the ranks as processes, lets each run `body`, and waits. Returns the exit code.
int run_ranks(int argc, char** argv, const std::vector<int>& sizes,
              const std::function<void(RankBench&)>& body);

}  // namespace tessera::bench
