#!/bin/sh
# The manual pages of file formats, from their descriptions in docs/: pages.sh DIR VERSION
set -eu

page() {
	{
		printf "'\\\\\" t\n.TH %s 5 \"\" \"fathom %s\" Fathom\n" "$(echo "$1" | tr a-z A-Z)" "$version"
		printf '.SH NAME\n%s \\- %s\n.SH DESCRIPTION\n' "$1" "$3"
		# The title is the page's own; links within a document and to its neighbours are words.
		sed -e 1d -e 's/\[\([^]]*\)\](\(#\|[a-z-]*\.md\)[^)]*)/\1/g' "$docs/$2" | lowdown -tman
	} > "$directory/$1.5"
}

directory=$1 version=$2
docs=$(dirname "$0")/../docs
page fathom.toml configuration.md 'disks that fathom serves'
page fathom-run run-directory.md 'what a measuring run of fathom leaves behind'
