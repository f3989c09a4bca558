#include "matcher.h"

int llmtap_matcher_abi(void) { return 1; }
