#!/usr/bin/env bash
# Installs the Vulkan device that ManiSkill needs on Debian; as root.
set -euo pipefail
# Mesa's software renderer, newer than Debian 12's own.
mesa="$(dpkg-query -W -f '${Version}' mesa-vulkan-drivers 2>/dev/null || true)"
if ! dpkg --compare-versions "$mesa" ge 23; then
  suite=()
  apt-get update -qq
  if grep -q '^VERSION_CODENAME=bookworm$' /etc/os-release; then
    # From where bookworm itself comes, whichever file says so.
    mirror="$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' | awk 'NR == 1')"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm-backports main" \
      >/etc/apt/sources.list.d/backports.list
    suite=(-t bookworm-backports)
    apt-get update -qq
  fi
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${suite[@]}" \
    mesa-vulkan-drivers libvulkan1 libegl1
fi
