"""The `rlightning` command as `python -m rlightning`, which torchrun starts it as."""

from rlightning.cli import main
from rlightning.cluster.guard import put_current_folder_last

if __name__ == "__main__":
    put_current_folder_last()
    main()
