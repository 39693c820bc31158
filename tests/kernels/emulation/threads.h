// The threads of a block on one thread of the CPU: each has a stack of its own and runs until it meets a barrier.
//
// One block runs after the other, so shared memory is static. The order of warps and of lanes turns round from one
// barrier to the next: a barrier that is missing shows in the results, the same way every time.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

enum class State { ready, at_warp, at_block, done };

struct Fiber {
  static constexpr std::size_t stack_bytes = 64 << 10;
  std::unique_ptr<char[]> stack{new char[stack_bytes]};
  ucontext_t context;
  jmp_buf at;
  bool entered = false;
  State state = State::done;
  unsigned number = 0;
  unsigned turn = 0;  // how often it has shown something to its warp
};

inline std::vector<std::unique_ptr<Fiber>> fibers;
inline Fiber* running = nullptr;  // null while the host's code runs
inline jmp_buf scheduler;
inline void (*body)(void*) = nullptr;
inline void* body_data = nullptr;
inline std::string fault;  // of the launch under way or about to be; device code cannot throw

inline void report(const std::string& text) {
  if (fault.empty()) fault = text;
}

// Gives the CPU back; returns when the scheduler resumes this thread.
__attribute__((noinline)) inline void leave(State state) {
  running->state = state;
  if (_setjmp(running->at) == 0) _longjmp(scheduler, 1);
}

// A fiber outlives its thread: it serves one thread of each block of each launch.
inline void serve() {
  for (;;) {
    body(body_data);
    leave(State::done);
  }
}

__attribute__((noinline)) inline void resume(Fiber& fiber) {
  running = &fiber;
  threadIdx = dim3(fiber.number % blockDim.x, fiber.number / blockDim.x);
  if (_setjmp(scheduler) != 0) {
    running = nullptr;
    return;
  }
  if (fiber.entered) _longjmp(fiber.at, 1);
  fiber.entered = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = Fiber::stack_bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, serve, 0);
  setcontext(&fiber.context);
}

inline unsigned count(unsigned first, unsigned end, State state) {
  unsigned found = 0;
  for (unsigned t = first; t < end; ++t) found += fibers[t]->state == state;
  return found;
}

inline void release(unsigned first, unsigned end) {
  for (unsigned t = first; t < end; ++t) fibers[t]->state = State::ready;
}

// Runs a warp until none of its threads can go on without the rest of the block.
inline void run_warp(unsigned first, unsigned end, bool& backwards) {
  for (;;) {
    for (unsigned i = 0; i < end - first; ++i) {
      Fiber& fiber = *fibers[backwards ? end - 1 - i : first + i];
      if (fiber.state == State::ready) resume(fiber);
    }
    backwards = !backwards;
    if (count(first, end, State::at_warp) != end - first) return;
    release(first, end);
  }
}

inline void run_block(unsigned threads, bool& backwards) {
  for (unsigned t = 0; t < threads; ++t) fibers[t]->number = t, fibers[t]->turn = 0, fibers[t]->state = State::ready;
  const unsigned warps = (threads + 31) / 32;
  for (;;) {
    const bool last_first = backwards;
    for (unsigned w = 0; w < warps; ++w) {
      const unsigned first = (last_first ? warps - 1 - w : w) * 32;
      run_warp(first, first + 32 < threads ? first + 32 : threads, backwards);
    }
    if (count(0, threads, State::done) == threads) return;
    if (count(0, threads, State::at_block) != threads) {
      report("threads wait at a barrier that others of their warp or block passed by");
      return;
    }
    release(0, threads);
  }
}

// Every thread of every block calls `call(data)`.
inline void launch_all(dim3 grid, dim3 block, void (*call)(void*), void* data) {
  const unsigned long long threads = 1ull * block.x * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z != 1 || grid.x == 0 || grid.y != 1 || grid.z != 1) {
    throw std::runtime_error("emulation: a GPU does not take, or the emulator does not know, a launch of " +
                             std::to_string(grid.x) + " blocks of " + std::to_string(threads) + " threads");
  }
  while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
  blockDim = block, gridDim = grid, body = call, body_data = data;
  bool backwards = false;
  for (unsigned b = 0; b < grid.x && fault.empty(); ++b) {
    blockIdx = dim3(b);
    run_block(static_cast<unsigned>(threads), backwards);
  }
  if (fault.empty()) return;
  fibers.clear();  // some stopped half-way
  throw std::runtime_error("emulation: " + std::exchange(fault, ""));
}

template <class Call>
void launch_each(dim3 grid, dim3 block, Call call) {
  launch_all(grid, block, [](void* data) { (*static_cast<Call*>(data))(); }, &call);
}

inline void sync_warp() { leave(State::at_warp); }

// What __launch_bounds__ says: a GPU refuses a launch of more threads.
inline void bound(unsigned most) {
  const unsigned threads = blockDim.x * blockDim.y;
  if (threads > most) report(std::to_string(threads) + " threads, where __launch_bounds__ says " + std::to_string(most));
}

inline unsigned lane() { return running->number % 32; }
inline unsigned warp() { return running->number / 32; }

}  // namespace emulation

inline void __syncthreads() { emulation::leave(emulation::State::at_block); }
