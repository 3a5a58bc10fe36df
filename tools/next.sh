#!/bin/sh
# What to try after the demo: `next.sh FATHOM`, the program. The runs that it names are those just made.
set -eu
fathom=$1
run=$(ls -dt fathom-wiki-*.run 2>/dev/null | head -n 1)

cat <<END

That was the demo. From here:

  $fathom report ${run:-RUN} --html run.html    # the same as a page, with each layer's distribution
  $fathom serve disk.img --vhost-user /run/fathom/disk.sock    # a disk for a virtual machine of yours:
  $fathom show disk.img --qemu                                 # what attaches it (or --libvirt, ...)
  $fathom top                                                  # what it does
  $fathom lab list                                             # questions that other experiments answer

  make test        nearly everything that is tested, in 18 minutes once built; it installs more (see tools/setup.sh)
  make install     the program, its manual pages, the service
  docs/README.md   the book
END
