#!/usr/bin/env bash
# Installs the Vulkan device that ManiSkill needs on Debian; as root.
set -euo pipefail
# Mesa's software renderer, newer than Debian 12's own.
mesa="$(dpkg-query -W -f '${Version}' mesa-vulkan-drivers 2>/dev/null || true)"
if ! dpkg --compare-versions "$mesa" ge 23; then
  suite=()
  if grep -q '^VERSION_CODENAME=bookworm$' /etc/os-release; then
    sources=/etc/apt/sources.list.d
    awk 'BEGIN { RS = "" } NR == 1' "$sources/debian.sources" |
      sed 's/^Suites:.*/Suites: bookworm-backports/' >"$sources/backports.sources"
    suite=(-t bookworm-backports)
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${suite[@]}" \
    mesa-vulkan-drivers libvulkan1 libegl1
fi
