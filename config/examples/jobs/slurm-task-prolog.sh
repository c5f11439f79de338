#!/bin/sh
# A TaskProlog for Slurm, which puts the plugin into every job of the node: TaskProlog=/etc/slurm/ringwatch-task-prolog.sh
#
# slurmstepd runs it as the job's user before each task, and reads lines from its output. `export NAME=value` sets a
# variable; the value ends at the end of the line and is not unquoted. There is no PATH, so all commands here are the shell's
# own. Nothing here can fail a job: where the library is missing, nothing is printed.
folder=/usr/lib/ringwatch
plugin=$folder/libnccl-profiler-ringwatch.so

# A job that has chosen a plugin, or none with NCCL_PROFILER_PLUGIN=none, keeps its choice.
if [ -z "${NCCL_PROFILER_PLUGIN+set}" ] && [ -r "$plugin" ]; then
  echo "export NCCL_PROFILER_PLUGIN=$plugin"
fi
exit 0
