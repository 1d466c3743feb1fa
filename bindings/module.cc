// monolith._core: one init_<noun> per C++ noun. Thin: checks shapes, releases the GIL, calls the core.
#include "module.h"

NB_MODULE(_core, m) {
  m.doc() = "The C++ core of Monolith. Use it through the `monolith` package.";
  // At exit, objects that torch or a traceback still holds are no leak.
  nanobind::set_leak_warnings(false);
  init_errors(m);
  init_bias(m);
  init_admission(m);
  init_dense_executor(m);
  init_executor(m);
  init_grpc(m);
  init_hash(m);
  init_http(m);
  init_infer(m);
  init_join(m);
  init_pairs(m);
  init_ragged(m);
  init_ranks(m);
  init_records(m);
  init_requests(m);
  init_rank_exchange(m);
  init_stream_records(m);
  init_table(m);
  init_touched_set(m);
}
