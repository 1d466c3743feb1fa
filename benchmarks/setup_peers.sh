#!/usr/bin/env bash
# Installs what the benchmarks compare against, under .venv-bench, and builds the memory limit.
# Without arguments: everything. With arguments: only those, as in `setup_peers.sh mlserver kserve`.
# A peer that cannot be installed is reported here and skipped in the benchmarks. Run again to retry; installed peers are kept.
set -u
cd "$(dirname "$0")/.."
base=.venv-bench
python=${PYTHON:-python3}
mkdir -p "$base"

# Exact versions: fbgemm-gpu-cpu is compiled against one torch release (1.8.0 against 2.13; 1.7.0 and 1.9.0 do not load
# with it), and a newer torch brings gigabytes of CUDA packages. --no-deps keeps either from choosing another one.
fbgemm() {
  "$1" -m pip install -q torch==2.13.0 numpy && "$1" -m pip install -q --no-deps fbgemm-gpu-cpu==1.8.0
}
fbgemm_import="from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen"

# TFRA's wheel does not load with tensorflow-cpu: it needs symbols of the CUDA build, which runs without a GPU.
tfra() {
  "$1" -m pip install -q tensorflow==2.16.2 tf-keras==2.16.0 tensorflow-recommenders-addons==0.8.1
}
tfra_import="import os; os.environ['TF_USE_LEGACY_KERAS'] = '1'; import tensorflow_recommenders_addons"

# TorchRec asks for "fbgemm-gpu", which is the CUDA build; the CPU build of the same release is enough.
torchrec() {
  fbgemm "$1" && "$1" -m pip install -q pyarrow tensordict torchmetrics==1.0.3 tqdm pyre-extensions &&
    "$1" -m pip install -q --no-deps torchrec==1.8.0
}
torchrec_import="import pyarrow; from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection"

# Model servers of serving.py. MLServer's worker processes do not start with newer releases of uvloop, and it imports pkg_resources.
kserve() {
  "$1" -m pip install -q torch==2.13.0 numpy kserve==0.21.0
}
kserve_import="import torch, kserve; assert kserve.ModelServer"

mlserver() {
  "$1" -m pip install -q torch==2.13.0 mlserver==1.7.1 'setuptools<81' 'uvloop<0.22'
}
mlserver_import="import torch, mlserver; assert mlserver.MLModel"

litserve() {
  "$1" -m pip install -q torch==2.13.0 numpy litserve==0.2.19
}
litserve_import="import torch, litserve; assert litserve.LitAPI"

bentoml() {
  "$1" -m pip install -q torch==2.13.0 numpy bentoml==1.4.39
}
bentoml_import="import torch, bentoml; assert bentoml.service"

rayserve() {
  "$1" -m pip install -q torch==2.13.0 numpy 'ray[serve]==2.60.0'
}
rayserve_import="import torch; from ray import serve; assert serve.deployment"

peer() {
  local name=$1 test=$2 bin=$base/$1/bin/python
  if "$bin" -c "$test" >/dev/null 2>&1; then
    echo "$name: ready"
  elif { [ -x "$bin" ] || "$python" -m venv "$base/$name"; } && "$name" "$bin" && "$bin" -c "$test" >"$base/$name.log" 2>&1; then
    echo "$name: installed"
  else
    echo "$name: could not be installed, the benchmark will skip it; see above and $base/$name.log"
    rm -rf "${base:?}/$name"
  fi
}

# Installed with our own packages and not in a separate environment, because parameter_server.py calls them from the process it measures.
exchange() {
  local folder=$base/exchange
  if [ -d "$folder/redis" ] && [ -d "$folder/ray" ]; then
    echo "exchange (Ray, Redis): ready"
  elif "$python" -m pip install -q --target "$folder" 'redis[hiredis]' ray >"$base/exchange.log" 2>&1; then
    echo "exchange (Ray, Redis): installed"
  else
    echo "exchange (Ray, Redis): could not be installed, the benchmark will skip it; see $base/exchange.log"
  fi
  if ! command -v redis-server >/dev/null && ! { [ "$(id -u)" = 0 ] && apt-get install -qq redis-server >/dev/null 2>&1; }; then
    echo "redis-server: not there, and could not be installed; parameter_server.py and freshness.py will skip it"
  fi
}

# Installed with our own packages: freshbench calls them in its own process, behind everything that this environment has.
online() {
  local folder=$base/online
  if [ -d "$folder/river" ] && [ -d "$folder/vowpalwabbit" ]; then
    echo "online (River, Vowpal Wabbit): ready"
  elif "$python" -m pip install -q --target "$folder" river==0.26.1 vowpalwabbit==9.11.9 >"$base/online.log" 2>&1; then
    echo "online (River, Vowpal Wabbit): installed"
  else
    echo "online (River, Vowpal Wabbit): could not be installed, freshbench will refuse them; see $base/online.log"
  fi
}

# Sends the requests of serving.py.
load() {
  if ! command -v h2load >/dev/null && ! { [ "$(id -u)" = 0 ] && apt-get install -qq nghttp2-client >/dev/null 2>&1; }; then
    echo "h2load: not there, and could not be installed; serving.py cannot compare servers"
  fi
}

limit() {
  local source=core/bench/memory_limit.cc binary=$base/memory_limit
  if [ "$binary" -nt "$source" ]; then
    echo "memory limit: ready"
  elif "${CXX:-g++}" -std=c++20 -O3 -fno-math-errno -fno-trapping-math -Icore/include "$source" -pthread -o "$binary"; then
    echo "memory limit: built"
  else
    echo "memory limit: could not be built, the benchmark will skip it"
  fi
}

all="limit fbgemm tfra torchrec kserve mlserver litserve bentoml rayserve load exchange online"
for name in ${*:-$all}; do
  case $name in
    limit | load | exchange | online) "$name" ;;
    fbgemm | tfra | torchrec | kserve | mlserver | litserve | bentoml | rayserve)
      test=${name}_import
      peer "$name" "${!test}"
      ;;
    *) echo "$name: there is no such peer" ;;
  esac
done
