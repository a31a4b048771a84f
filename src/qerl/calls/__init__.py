"""Calls of user code with a time limit: reward functions, tools and environments.

The kind of the call decides between two ways.

* What computes in this process is called in this thread, one call at a time, and interrupted by an alarm
  (:mod:`qerl.calls.alarm`). Reward libraries such as math-verify need the main thread, whose alarm they use.
* What waits for something is called beside this thread (:mod:`qerl.calls.beside`): coroutines on one event
  loop, which a client that is kept between calls belongs to, and plain functions in a thread per call.
"""
