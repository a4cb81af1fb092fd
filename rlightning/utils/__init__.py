"""What every other part uses: config, registry, conversions, flags."""
