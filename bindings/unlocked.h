// Around what runs without the interpreter's lock, so that other Python threads go on.
#pragma once

#include <nanobind/nanobind.h>

#include "monolith/core_call.h"

struct Unlocked {
  nanobind::gil_scoped_release release;
  // After the lock is released: a thread that forks holds it, and waits for calls that run.
  monolith::CoreCall call;
};
