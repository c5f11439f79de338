#!/usr/bin/env bash
# A hook for enroot, and so for pyxis, which puts the plugin into every container: /etc/enroot/hooks.d/50-ringwatch.sh
#
# enroot runs it before a container starts, with the container's root and environment file. It fails no container: where the
# library or the mount is missing, the container starts without the plugin.
set -u
folder=/usr/lib/ringwatch
plugin=$folder/libnccl-profiler-ringwatch.so

# An image that names a plugin keeps it, and this hook changes nothing the second time.
if [ ! -r "$plugin" ] || grep -q '^NCCL_PROFILER_PLUGIN=' "$ENROOT_ENVIRON"; then
  exit 0
fi
if enroot-mount --root "$ENROOT_ROOTFS" - <<<"$folder $folder none x-create=dir,bind,ro,nosuid,nodev,private"; then
  echo "NCCL_PROFILER_PLUGIN=$plugin" >>"$ENROOT_ENVIRON"
else
  echo "ringwatch: $folder is not mounted, and this container starts without the plugin" >&2
fi
exit 0
