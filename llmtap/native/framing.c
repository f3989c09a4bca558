#include "framing.h"

int llmtap_framing_abi(void) { return 1; }
