"""Run benchmarks.ppo.run as `python -m benchmarks.ppo`."""

from benchmarks.ppo.run import main

if __name__ == "__main__":
    main()
