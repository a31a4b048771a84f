"""Calls of user code with a time limit: reward functions, tools and environments.

The kind of the call decides between the ways.

* What computes in this process is called in this thread, one call at a time, and interrupted by an alarm
  (:mod:`qerl.calls.alarm`). Some reward libraries need the main thread, whose alarm they use.
* What math-verify compares, which an alarm cannot always interrupt, is compared in a process of its own
  (:mod:`qerl.calls.symbolic`).
* What waits for something is called beside this thread (:mod:`qerl.calls.beside`): coroutines on one event
  loop, which a client that is kept between calls belongs to, and plain functions in a thread per call.
"""
