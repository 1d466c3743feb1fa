#pragma once

#include <nanobind/nanobind.h>

void init_admission(nanobind::module_& m);
void init_bias(nanobind::module_& m);
void init_dense_executor(nanobind::module_& m);
void init_errors(nanobind::module_& m);
void init_executor(nanobind::module_& m);
void init_grpc(nanobind::module_& m);
void init_http(nanobind::module_& m);
void init_infer(nanobind::module_& m);
void init_hash(nanobind::module_& m);
void init_join(nanobind::module_& m);
void init_pairs(nanobind::module_& m);
void init_ragged(nanobind::module_& m);
void init_ranks(nanobind::module_& m);
void init_records(nanobind::module_& m);
void init_stream_records(nanobind::module_& m);
void init_table(nanobind::module_& m);
void init_rank_exchange(nanobind::module_& m);
void init_requests(nanobind::module_& m);
void init_touched_set(nanobind::module_& m);
