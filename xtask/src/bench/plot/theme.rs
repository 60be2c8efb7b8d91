use plotters::style::RGBColor;

/// Colours for a light or a dark page. Plots have a transparent background.
pub(crate) struct Theme {
    pub(crate) text: RGBColor,
    /// Secondary text.
    pub(crate) muted: RGBColor,
    pub(crate) grid: RGBColor,
    ours: RGBColor,
    also: RGBColor,
    limit: RGBColor,
    peers: [RGBColor; 6],
}

/// The role of a line or a bar, which selects its colour.
#[derive(Clone, Copy)]
pub(crate) enum ColourRole {
    Ours,
    Variant,
    Limit,
    Peer(usize),
}

pub(crate) const LIGHT: Theme = Theme {
    text: RGBColor(0x1f, 0x23, 0x28),
    muted: RGBColor(0x59, 0x63, 0x6e),
    grid: RGBColor(0xd8, 0xde, 0xe4),
    ours: RGBColor(0x09, 0x69, 0xda),
    also: RGBColor(0x54, 0xae, 0xff),
    limit: RGBColor(0x8c, 0x95, 0x9f),
    peers: [
        RGBColor(0xe1, 0x6f, 0x24),
        RGBColor(0x2d, 0xa4, 0x4e),
        RGBColor(0x82, 0x50, 0xdf),
        RGBColor(0xbf, 0x39, 0x89),
        RGBColor(0x9a, 0x67, 0x00),
        RGBColor(0xcf, 0x22, 0x2e),
    ],
};

pub(crate) const DARK: Theme = Theme {
    text: RGBColor(0xf0, 0xf6, 0xfc),
    muted: RGBColor(0x91, 0x98, 0xa1),
    grid: RGBColor(0x30, 0x36, 0x3d),
    ours: RGBColor(0x44, 0x93, 0xf8),
    also: RGBColor(0xa5, 0xd6, 0xff),
    limit: RGBColor(0x8b, 0x94, 0x9e),
    peers: [
        RGBColor(0xf0, 0x88, 0x3e),
        RGBColor(0x3f, 0xb9, 0x50),
        RGBColor(0xab, 0x7d, 0xf8),
        RGBColor(0xdb, 0x61, 0xa2),
        RGBColor(0xd2, 0x99, 0x22),
        RGBColor(0xf8, 0x51, 0x49),
    ],
};

impl Theme {
    pub(crate) fn colour(&self, ink: ColourRole) -> RGBColor {
        match ink {
            ColourRole::Ours => self.ours,
            ColourRole::Variant => self.also,
            ColourRole::Limit => self.limit,
            ColourRole::Peer(number) => self.peers[number % self.peers.len()],
        }
    }
}
