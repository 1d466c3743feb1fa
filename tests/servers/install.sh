#!/usr/bin/env bash
# Installs the servers that some tests talk to: ZooKeeper with apt, Consul below .cache/servers. What is there is kept.
# Nothing here fails a test run: a server that cannot be had is named, and its tests skip and name it again.
set -u
cd "$(dirname "$0")/../.."
cache=$PWD/.cache/servers
mkdir -p "$cache"

missing() { echo "$1: not installed ($2); its tests will be skipped"; }

# A package registry that does not answer must not hold up the tests.
apt() { timeout 50 apt-get -q -o Acquire::Retries=1 -o Acquire::http::Timeout=10 -o DPkg::Lock::Timeout=20 "$@" >>"$cache/install.log" 2>&1; }

zookeeper() {
  [ -e /usr/share/java/zookeeper.jar ] && type -P java >/dev/null && return
  [ "$(id -u)" = 0 ] || { missing zookeeper "needs root: apt-get install zookeeper"; return; }
  type -P apt-get >/dev/null || { missing zookeeper "no apt-get here"; return; }
  echo "Installing zookeeper ..."
  export DEBIAN_FRONTEND=noninteractive
  apt install -y --no-install-recommends zookeeper && return
  { apt update && apt install -y --no-install-recommends zookeeper; } ||
    missing zookeeper "apt-get failed, see .cache/servers/install.log"
}

# The release of Debian before this one has Consul as one static binary, which is unpacked and not installed. Its package
# list is asked for with the address and keys of this machine's own, in folders of ours.
consul() {
  type -P consul >/dev/null && return
  [ -x "$cache/consul" ] && return
  local sources=/etc/apt/sources.list.d/debian.sources
  [ -r $sources ] || { missing consul "no apt sources of Debian here"; return; }
  echo "Downloading consul ..."
  local work=$cache/download
  rm -rf "$work" && mkdir -p "$work"/{sources,lists/partial,cache/archives/partial,package}
  awk '!NF { exit } { sub(/^Suites:.*/, "Suites: bullseye") } 1' $sources >"$work/sources/debian.sources"
  # With the rights of whoever runs this: the user apt switches to may not enter this folder.
  local options=(-o "Dir::Etc::sourcelist=/dev/null" -o "Dir::Etc::sourceparts=$work/sources" -o "Dir::State::lists=$work/lists"
    -o "Dir::Cache=$work/cache" -o "Acquire::Languages=none" -o "APT::Sandbox::User=$(id -un)")
  if apt "${options[@]}" update && (cd "$work/package" && apt "${options[@]}" download consul) &&
    dpkg-deb -x "$work"/package/consul_*.deb "$work/package" && mv "$work/package/usr/bin/consul" "$cache/consul"; then
    rm -rf "$work"
  else
    missing consul "download failed, see .cache/servers/install.log"
  fi
}

zookeeper
consul
